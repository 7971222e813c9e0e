"""The picture of a run: what is remembered of its events, and how it is laid out for a terminal."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedtrain.observe.lines import count, duration, numbers, one_line
from fedtrain.observe.status import Status

_ROWS = 8
"""Clients that are shown one by one."""

_STYLES = {
    "ok": "green",
    "working": "cyan",
    "declined": "yellow",
    "late": "yellow",
    "failed": "red",
    "invalid": "red",
    "lost": "red",
    "completed": "bold green",
    "stopped": "bold yellow",
}
_ORDER = ("failed", "invalid", "lost", "late", "declined", "working", "ok")
"""Where there are too many clients, those in trouble are shown first, then those that are still awaited."""

_BLOCKS = "▁▂▃▄▅▆▇█"


class Progress:
    """What the picture needs to remember beside the run's `Status`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.status = Status(clock)
        self.outcomes: dict[str, Mapping[str, Any]] = {}
        self.curve: list[float] = []
        self.curve_name = ""
        self.note_text = ""
        self._asked_at: float | None = None
        self._first_at: float | None = None
        self._done = 0

    def note(self, event: str, round: int, fields: Mapping[str, Any]) -> None:
        """Take note of an event."""
        self.status(event, round, **fields)
        if event == "selected":
            self.outcomes, self.note_text, self._asked_at = {}, "", self.clock()
            self._first_at = self._asked_at if self._first_at is None else self._first_at
        elif event == "outcome" and fields.get("kind", "train") == "train":
            self.outcomes[fields["client"]] = fields
        elif event == "retry":
            for client in fields["missing"]:
                self.outcomes.pop(client, None)
            self.note_text = f"too few answers, asking again (attempt {fields['attempt']})"
        elif event == "round_finished":
            self._done += 1
            self._asked_at = None
            if fields.get("skipped"):
                self.note_text = f"round {round} skipped: {fields['skipped']}"
            self._grow(fields.get("metrics"), ("loss",))
        elif event == "evaluated":
            self._grow(fields.get("metrics"), ("accuracy", "loss"))

    def left_s(self) -> float | None:
        """Seconds until the run ends if it goes on as so far; None before a round is done."""
        facts = self.status.snapshot()
        if not self._done or self._first_at is None:
            return None
        # A round that is under way counts as soon as it takes longer than the others did.
        now = self.clock()
        finished_at = now if self._asked_at is None else self._asked_at
        each = (finished_at - self._first_at) / self._done
        running = 0.0 if self._asked_at is None else now - self._asked_at
        rounds = int(facts["rounds"]) - int(facts["rounds_completed"])
        return max(0.0, rounds * each - min(running, each))

    def working_s(self) -> float:
        """Seconds since the clients of this round were asked."""
        return 0.0 if self._asked_at is None else self.clock() - self._asked_at

    def _grow(self, metrics: Mapping[str, Any] | None, wanted: tuple[str, ...]) -> None:
        name = next((name for name in wanted if isinstance((metrics or {}).get(name), (int, float))), "")
        if not name or (self.curve_name == "accuracy" and name != "accuracy"):
            return
        if name != self.curve_name:
            self.curve, self.curve_name = [], name
        self.curve.append(float((metrics or {})[name]))


def panel(progress: Progress, *, unicode: bool = True) -> RenderableType:
    """The picture: a few lines and at most eight clients, however many there are."""
    facts = progress.status.snapshot()
    parts = [_head(progress, facts), _metrics(progress, facts, unicode), *_clients(progress, facts)]
    return Panel(
        Group(*(part for part in parts if part is not None)),
        title=Text.assemble(("fedtrain", "bold"), f" {facts['run']}" if facts["run"] else ""),
        title_align="left",
        border_style="dim",
        box=box.ROUNDED,
        padding=(0, 1),
    )


def _head(progress: Progress, facts: Mapping[str, Any]) -> RenderableType:
    rounds, done, status = facts["rounds"], facts["rounds_completed"], facts["status"]
    phase = status
    if status == "waiting":
        phase = f"waiting for clients, {facts['connected']} of {facts['needed']} connected"
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1, min_width=8)
    row.add_column(no_wrap=True)
    row.add_column(no_wrap=True, justify="right")
    times = [duration(facts["elapsed_s"])]
    left = progress.left_s()
    if left is not None and done < rounds:
        times.append(f"{duration(left)} left")
    row.add_row(
        Text(f"round {facts['round']} of {rounds}", "bold"),
        ProgressBar(total=max(1, rounds), completed=done, complete_style="green", finished_style="green"),
        Text(phase, _STYLES.get(status, "cyan")),
        Text(", ".join(times), "dim"),
    )
    return row


def _metrics(progress: Progress, facts: Mapping[str, Any], unicode: bool) -> RenderableType | None:
    text = Text(no_wrap=True, overflow="ellipsis")
    for fact in numbers(facts["metrics"])[:4]:
        name, value = one_line(fact).rsplit(" ", 1)
        text.append(f"{name} ", "dim").append(f"{value}   ", "bold" if name == "accuracy" else "")
    if unicode and len(progress.curve) > 1:
        text.append(f"{_sparkline(progress.curve[-24:])} ", "green").append(progress.curve_name, "dim")
    return text if text else None


def _clients(progress: Progress, facts: Mapping[str, Any]) -> list[RenderableType]:
    asked = facts["asked"]
    lines: list[RenderableType] = []
    if asked:
        kinds = {client: _kind(progress, facts, client) for client in asked}
        counts = Counter(kinds.values())
        summary = Text(f"asked {count(len(asked), 'client')}: ", no_wrap=True, overflow="ellipsis")
        for kind in reversed(_ORDER):
            if counts[kind]:
                summary.append(f"{counts[kind]:,} {kind}", _STYLES[kind]).append("   ")
        others = facts["connected"] - sum(facts["clients"].get(client, {}).get("connected", False) for client in asked)
        if others > 0:
            summary.append(f"{others:,} more connected", "dim")
        lines.append(summary)
        first = asked
        if len(asked) > _ROWS:
            first = sorted(asked, key=lambda client: _ORDER.index(kinds[client]))[:_ROWS]
        lines.append(_rows(progress, {client: kinds[client] for client in first}))
        if len(asked) > len(first):
            rest = Counter(kinds[client] for client in asked if client not in first)
            text = ", ".join(f"{rest[kind]:,} {kind}" for kind in reversed(_ORDER) if rest[kind])
            lines.append(Text(f"  and {len(asked) - len(first):,} more: {text}", "dim", no_wrap=True))
    elif facts["connected"]:
        connected = [name for name, client in facts["clients"].items() if client["connected"]]
        shown = ", ".join(connected[:_ROWS])
        more = f" and {len(connected) - _ROWS:,} more" if len(connected) > _ROWS else ""
        lines.append(Text(f"connected: {shown}{more}", "dim", no_wrap=True, overflow="ellipsis"))
    if progress.note_text:
        lines.append(Text(one_line(progress.note_text), "yellow", no_wrap=True, overflow="ellipsis"))
    return lines


def _kind(progress: Progress, facts: Mapping[str, Any], client: str) -> str:
    outcome = progress.outcomes.get(client)
    if outcome is not None:
        return str(outcome["outcome"])
    return "working" if facts["clients"].get(client, {}).get("connected", True) else "lost"


def _rows(progress: Progress, kinds: Mapping[str, str]) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, overflow="ellipsis", style="dim", ratio=1)  # a long reason is cut, the rest is not
    for client, kind in kinds.items():
        outcome = progress.outcomes.get(client, {})
        seconds = outcome.get("seconds", 0.0) if outcome else progress.working_s()
        facts = outcome.get("reason", "")
        if kind == "ok":
            facts = ", ".join([count(outcome.get("num_examples", 0), "example"), *numbers(outcome.get("metrics"))])
        # As `Text`, or what a client says would be read as Rich's markup.
        table.add_row(f"  {client}", Text(kind, _STYLES[kind]), duration(seconds), Text(one_line(facts)))
    return table


def _sparkline(values: list[float]) -> str:
    low, high = min(values), max(values)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in values)
