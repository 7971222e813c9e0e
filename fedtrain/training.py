"""One run from first to last: the loop, what it tells, and what it leaves in the run directory."""

import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

from fedtrain.client.trainer import Trainer
from fedtrain.errors import ConfigError, ParamsError
from fedtrain.evaluate import Where, evaluation
from fedtrain.fleet.fleet import Fleet
from fedtrain.observe.display import Display
from fedtrain.observe.events import Events
from fedtrain.observe.result import write_result
from fedtrain.observe.status import Status
from fedtrain.params import all_finite, read_file, require_same_layout, write_file
from fedtrain.plan import CohortSettings
from fedtrain.rounds import first_state, run
from fedtrain.run_folder import EVENTS, MODEL, RESULT, move_aside
from fedtrain.schema import Config
from fedtrain.state import RunState
from fedtrain.strategy import Strategy
from fedtrain.types import Start, WireDtype

RunStatus = Literal["completed", "failed", "stopped"]


class Training:
    """A run with its events, display and status; a context manager that leaves the terminal as it was.

    An earlier run's files move aside when the context is entered, and not before. From the end of the last round to
    that of the context, SIGINT and SIGTERM are ignored: how the run has ended is settled, and is being written down.

    Args:
        config: What the user asked for.
        strategy: Built from it.
        trainer: The server's: measures models on held-out data.
        start: What the run begins with: see `initial_model`.
        folder: The run directory.
        run: The run's id.
    """

    def __init__(
        self, config: Config, strategy: Strategy, trainer: Trainer, start: Start, folder: Path, *, run: str
    ) -> None:
        self.run, self.status = run, Status()
        self._config, self._strategy, self._trainer, self._folder = config, strategy, trainer, folder
        self._start = start
        self._display = Display(config.display)
        self._events: Events | None = None
        self._ending = ExitStack()

    def report(self, event: str, round: int = 0, **fields: object) -> None:
        """Take an event of the run; what happens before the context is entered is not the run's."""
        if self._events is not None:
            self._events(event, round, **fields)

    def __enter__(self) -> "Training":
        move_aside(self._folder)
        self._events = Events(self._folder / EVENTS, [self.status, self._display])
        self._display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._ending:
            self._display.__exit__(kind, error, trace)
            if self._events is not None:
                self._events.close()

    def train(self, fleet: Fleet, *, address: str) -> RunStatus:
        """Run all rounds. Whatever happens, the last good model and a result are written; says how it ended."""
        config, began = self._config, time.monotonic()
        settings = cohort_settings(config)
        self.report(
            "run_started",
            run=self.run,
            rounds=config.rounds,
            seed=config.seed,
            address=address,
            run_dir=str(self._folder),
            clients_needed=settings.needed(self._strategy),
        )
        latest = first_state(self._strategy, self._start, config.seed)

        def keep(state: RunState) -> None:
            nonlocal latest
            latest = state

        status: RunStatus = "completed"
        reason, trace = "", ""
        try:
            measure = evaluation(
                cast(Where, config.evaluation.where),
                every=config.evaluation.every,
                rounds=config.rounds,
                trainer=self._trainer,
                settings=settings,
                report=self.report,
            )
            run(
                self._strategy,
                fleet,
                latest,
                rounds=config.rounds,
                settings=settings,
                evaluate=measure,
                save=keep,
                report=self.report,
            )
            if not latest.num_succeeded:
                status, reason = "failed", f"no round succeeded; the last one: {latest.history[-1].skipped}"
            self._ending.enter_context(_signals_ignored())
        except KeyboardInterrupt:
            self._ending.enter_context(_signals_ignored())
            status, reason = "stopped", "interrupted"
        except Exception as error:
            self._ending.enter_context(_signals_ignored())
            status, reason, trace = "failed", f"{type(error).__name__}: {error}", traceback.format_exc()
        self._finish(latest, status, reason, time.monotonic() - began)
        if trace:
            print(trace, file=sys.stderr, flush=True)
        return status

    def _finish(self, state: RunState, status: RunStatus, reason: str, seconds: float) -> None:
        model, digest, metrics = self._folder / MODEL, state.model_digest, final_metrics(state)
        write_file(model, state.model)
        write_result(
            self._folder / RESULT,
            status=status,
            rounds_completed=state.round,
            rounds_skipped=sum(bool(record.skipped) for record in state.history),
            model_digest=digest,
            final_metrics=metrics,
            reason=reason,
            run=self.run,
            seed=state.seed,
            seconds=round(seconds, 3),
        )
        self.report(
            "run_finished",
            status=status,
            rounds_completed=state.round,
            reason=reason,
            model=str(model),
            digest=digest,
            metrics=metrics,
            seconds=round(seconds, 3),
        )


@contextmanager
def _signals_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # no other thread has signals
        yield
        return
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    for number, _ in before:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before:
            if handler is not None:  # None: it was not set from Python
                signal.signal(number, handler)


def initial_model(config: Config, trainer: Trainer) -> Start:
    """The model that a run begins with: a function of the seed, or the file that the configuration names.

    To be called before the run folder is entered: the file may be an earlier run's, which moves aside then.

    Raises:
        ConfigError: the file can't be read, or its arrays are not those of the model, or not finite.
    """
    start = trainer.initial(config.seed)
    if config.initial_model is None:
        return start
    try:
        found = read_file(config.initial_model)
        require_same_layout(found, {**start.params, **start.buffers}, what="the model in this file")
    except ParamsError as error:
        raise ConfigError(
            f"model.initial={config.initial_model}: {error} (expected a safetensors file that holds this model)"
        ) from error
    for name in start.params:
        if not all_finite(found[name]):
            raise ConfigError(f"model.initial={config.initial_model}: {name!r} holds NaN or infinity: use another file")
    return Start({name: found[name] for name in start.params}, {name: found[name] for name in start.buffers})


def cohort_settings(config: Config) -> CohortSettings:
    """What a round needs to know of the configuration."""
    return CohortSettings(**vars(config.cohort), wire_dtype=cast(WireDtype | None, config.wire.dtype))


def final_metrics(state: RunState) -> dict[str, Any]:
    """What the last evaluation measured, and each client's accuracy where clients evaluated."""
    for record in reversed(state.history):
        if record.evaluation or record.evaluation_by_client:
            by_client = {
                client: metrics["accuracy"]
                for client, metrics in record.evaluation_by_client.items()
                if "accuracy" in metrics
            }
            return {**record.evaluation, **({"accuracy_by_client": by_client} if by_client else {})}
    return {}
