"""Display: a run on a terminal while it happens, or one line per event where there is none."""

import atexit
import logging
import sys
import threading
from types import TracebackType
from typing import IO, Any, Literal, get_args

from rich.console import Console
from rich.live import Live

from fedtrain.observe.lines import Lines, line_of
from fedtrain.observe.panel import Progress, panel

Mode = Literal["auto", "live", "lines", "none"]

_REDRAWS_PER_S = 8


class Display:
    """A `Report` that shows a run.

    Use it as a context manager: the terminal is as before when it ends, also by an exception. While it is live, what
    else is printed or logged appears above it. May be called from any thread.

    Args:
        mode: ``live`` draws on the terminal, at most some eight times a second; ``lines`` writes one line per event;
            ``none`` shows nothing; ``auto`` is live on a terminal that can be drawn on, else lines.
        stream: Where to; None: standard output.

    Raises:
        ValueError: there is no such mode.
    """

    def __init__(self, mode: Mode | str = "auto", stream: IO[str] | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._console = Console(file=self._stream, highlight=False, soft_wrap=False)
        if mode not in get_args(Mode):
            raise ValueError(f"display mode must be one of {', '.join(get_args(Mode))}, found {mode!r}")
        if mode == "auto":
            # Rich takes any stream for a terminal where FORCE_COLOR is set, as it is in many build systems.
            mode = "live" if self._stream.isatty() and not self._console.is_dumb_terminal else "lines"
        self._mode = mode
        self._closed = False
        self._progress = Progress()
        self._lines = Lines(self._write_line)
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []

    @property
    def mode(self) -> str:
        """What is shown: ``live``, ``lines`` or ``none``."""
        return self._mode

    def __call__(self, event: str, round: int = 0, **fields: Any) -> None:
        """Show an event of a round (0: none)."""
        if self._mode == "lines":
            self._lines(event, round, **fields)
        elif self._mode == "live":
            with self._lock:
                self._progress.note(event, round, fields)
            if event == "run_finished":
                self.close()
                self._write_line(line_of(event, fields))
            elif not self._closed:
                self._open()

    def close(self) -> None:
        """Stop drawing; the last picture stays on the terminal, and only the end of the run is still told.

        Harmless when repeated.
        """
        self._closed = True
        live, self._live = self._live, None
        if live is not None:
            for handler, stream in self._handlers:
                handler.setStream(stream)
            self._handlers.clear()
            live.stop()
            atexit.unregister(self.close)

    def __enter__(self) -> "Display":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        if self._live is not None:
            return
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            refresh_per_second=_REDRAWS_PER_S,
            vertical_overflow="crop",
        )
        # Who forgets to close must not be left with a terminal without a cursor.
        atexit.register(self.close)
        self._live.start()
        # Log handlers hold the stream that was standard output when they were made, and would write into the picture.
        for logger in (logging.getLogger(), logging.getLogger("flwr")):
            for handler in logger.handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.__stdout__, sys.__stderr__):
                    self._handlers.append((handler, handler.stream))
                    handler.setStream(sys.stderr)

    def _draw(self) -> Any:
        with self._lock:
            return panel(self._progress, unicode=not self._console.options.ascii_only)

    def _write_line(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()
