"""One line of text for each event, where there is no terminal to draw on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_SHOWN = 6
"""Clients that are named in a line; of the others only the number is said."""


class Lines:
    """A `Report` that writes one line per event.

    Args:
        write: Given each line, without an end of line.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._rounds = 0

    def __call__(self, event: str, round: int = 0, **fields: Any) -> None:
        """Write the line of an event of a round (0: none)."""
        if event == "run_started":
            self._rounds = int(fields.get("rounds", 0))
        where = "" if not round else f"round {round}/{self._rounds}: " if self._rounds else f"round {round}: "
        if event in ("client_connected", "client_returned", "client_lost", "client_refused", "waiting"):
            where = ""
        self._write(where + line_of(event, fields))


def line_of(event: str, fields: Mapping[str, Any]) -> str:
    """The event in words, without its round."""
    line = _LINES.get(event)
    if line is None:
        return one_line(" ".join([event, *(f"{key}={value}" for key, value in fields.items())]))
    return one_line(line(**fields))


def one_line(text: str) -> str:
    r"""Text with its line ends and controls escaped, as ``\n``: what a client says must not look like another event."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _run_started(run: str = "", rounds: int = 0, seed: int = 0, **rest: Any) -> str:
    where = f", listening on {rest['address']}" if rest.get("address") else ""
    files = f", files in {rest['run_dir']}" if rest.get("run_dir") else ""
    return f"run {run}: {count(rounds, 'round')}, seed {seed}{where}{files}"


def _waiting(connected: int, needed: int, **rest: Any) -> str:
    return f"waiting for clients: {connected} of {needed} connected"


def _client_connected(client: str, num_examples: int = 0, **rest: Any) -> str:
    tags = "".join(f", {key} {value}" for key, value in (rest.get("tags") or {}).items())
    return f"client {client} connected ({count(num_examples, 'example')}{tags})"


def _client_returned(client: str, **rest: Any) -> str:
    return f"client {client} is back"


def _client_lost(client: str, reason: str = "", **rest: Any) -> str:
    return f"client {client} lost" + (f": {reason}" if reason else "")


def _client_refused(client: str, reason: str = "", **rest: Any) -> str:
    return f"client {client} refused: {reason}"


def _selected(chosen: Sequence[Mapping[str, Any]], eligible: int = 0, **rest: Any) -> str:
    return f"asking {len(chosen)} of {count(eligible, 'client')}: {names([each['client'] for each in chosen])}"


def _outcome(
    client: str, outcome: str, seconds: float = 0.0, reason: str = "", kind: str = "train", **rest: Any
) -> str:
    what = "evaluated" if kind == "evaluate" else "ok"
    if outcome != "ok":
        what = f"{outcome} at evaluating" if kind == "evaluate" else outcome
        return f"{client} {what} after {duration(seconds)}" + (f": {reason}" if reason else "")
    facts = [count(rest.get("num_examples", 0), "example"), *numbers(rest.get("metrics"))]
    return f"{client} {what} in {duration(seconds)} ({', '.join(facts)})"


def _retry(missing: Sequence[str], attempt: int = 1, **rest: Any) -> str:
    return f"too few answers, asking again (attempt {attempt}): {names(missing)}"


def _round_finished(counted: int, asked: int, skipped: str = "", seconds: float = 0.0, **rest: Any) -> str:
    if skipped:
        return f"skipped after {duration(seconds)}, the model stays: {skipped}"
    return ", ".join([f"{counted} of {asked} counted in {duration(seconds)}", *numbers(rest.get("metrics"))])


def _evaluated(where: str, metrics: Mapping[str, Any], **rest: Any) -> str:
    return f"evaluated on the {where}: {', '.join(numbers(metrics)) or 'no metrics'}"


def _run_finished(status: str, rounds_completed: int = 0, reason: str = "", **rest: Any) -> str:
    facts = [count(rounds_completed, "round"), *numbers(rest.get("metrics"))]
    model = f"; model in {rest['model']}" if rest.get("model") else ""
    return f"run {status}: {', '.join(facts)}{f': {reason}' if reason else ''}{model}"


_LINES: Mapping[str, Callable[..., str]] = {
    "run_started": _run_started,
    "waiting": _waiting,
    "client_connected": _client_connected,
    "client_returned": _client_returned,
    "client_lost": _client_lost,
    "client_refused": _client_refused,
    "selected": _selected,
    "outcome": _outcome,
    "retry": _retry,
    "round_finished": _round_finished,
    "evaluated": _evaluated,
    "run_finished": _run_finished,
}


def count(number: int, noun: str) -> str:
    """A number and its noun: 1 round, 2 rounds."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def names(clients: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    shown = ", ".join(clients[:_SHOWN])
    return shown if len(clients) <= _SHOWN else f"{shown} and {len(clients) - _SHOWN:,} more"


def numbers(metrics: Mapping[str, Any] | None) -> list[str]:
    """Name and value of each metric that is a number; accuracy first."""
    found = {name: value for name, value in (metrics or {}).items() if isinstance(value, (int, float))}
    return [f"{name} {found[name]:.4g}" for name in sorted(found, key=lambda name: (name != "accuracy", name))]


def duration(seconds: float) -> str:
    """``12 ms``, ``0.8 s``, ``45 s``, ``3:20``, ``1:02:03``."""
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
