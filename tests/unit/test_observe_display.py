"""Display: lines without a terminal, a short picture on one, and a terminal that is left as it was found."""

import io
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from fedtrain.observe.display import Display
from fedtrain.observe.lines import duration
from fedtrain.observe.panel import Progress, panel

OK: dict[str, Any] = {"outcome": "ok", "reason": "", "kind": "train", "task": 0}


def asked(*clients: str) -> list[dict[str, object]]:
    return [{"client": client, "probability": 1.0, "work": {}} for client in clients]


def test_without_a_terminal_each_event_is_one_line() -> None:
    out = io.StringIO()
    with Display("auto", out) as report:
        assert report.mode == "lines"
        report("run_started", run="r1", rounds=10, seed=4, address="127.0.0.1:9092", run_dir="runs/a", clients_needed=2)
        report("waiting", 1, connected=1, needed=2)
        report("client_connected", client="c2", num_examples=1, tags={"site": "berlin"})
        report("selected", 3, eligible=9, quorum=2, chosen=asked("c1", "c2"))
        report("outcome", 3, client="c2", seconds=0.8, num_examples=231, metrics={"loss": 0.41, "accuracy": 0.9}, **OK)
        report("outcome", 3, client="c1", outcome="failed", reason="RuntimeError: no", seconds=61.4, kind="train")
        report("client_lost", client="c1", reason="silent for 5 s")
        report("client_returned", client="c1")
        report("retry", 3, missing=["c1"], attempt=2)
        report("round_finished", 3, counted=2, asked=2, skipped="", seconds=1.25, metrics={"loss": 0.4})
        report("round_finished", 4, counted=0, asked=2, skipped="too few", seconds=0.02, metrics={})
        report("outcome", 4, client="c1", outcome="ok", kind="evaluate", seconds=0.2, num_examples=20, metrics={})
        report("evaluated", 4, where="server", metrics={"loss": 0.3, "accuracy": 0.95}, by_client={})
        report("something_new", 4, colour="green")
        report("run_finished", status="stopped", rounds_completed=4, reason="asked to", model="m.st", metrics={})
    assert out.getvalue().splitlines() == [
        "run r1: 10 rounds, seed 4, listening on 127.0.0.1:9092, files in runs/a",
        "waiting for clients: 1 of 2 connected",
        "client c2 connected (1 example, site berlin)",
        "round 3/10: asking 2 of 9 clients: c1, c2",
        "round 3/10: c2 ok in 0.8 s (231 examples, accuracy 0.9, loss 0.41)",
        "round 3/10: c1 failed after 1:01: RuntimeError: no",
        "client c1 lost: silent for 5 s",
        "client c1 is back",
        "round 3/10: too few answers, asking again (attempt 2): c1",
        "round 3/10: 2 of 2 counted in 1.2 s, loss 0.4",
        "round 4/10: skipped after 20 ms, the model stays: too few",
        "round 4/10: c1 evaluated in 0.2 s (20 examples)",
        "round 4/10: evaluated on the server: accuracy 0.95, loss 0.3",
        "round 4/10: something_new colour=green",
        "run stopped: 4 rounds: asked to; model in m.st",
    ]


def test_a_line_names_a_few_of_many_clients() -> None:
    out = io.StringIO()
    Display("lines", out)("selected", 1, eligible=200, chosen=asked(*(f"c{number}" for number in range(200))))
    assert out.getvalue() == "round 1: asking 200 of 200 clients: c0, c1, c2, c3, c4, c5 and 194 more\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0124, "12 ms"),
        (0.1, "0.1 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1:00"),
        (200, "3:20"),
        (3723, "1:02:03"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


FORGED = "no\nrun r1 completed\r\x1b[2J\u2028[/red]"


def test_what_a_client_says_does_not_make_a_line_of_its_own() -> None:
    out = io.StringIO()
    with Display("lines", out) as report:
        report("outcome", client="c1", outcome="failed", reason=FORGED, seconds=1.0, kind="train")
        report("something_new", text="a\nb")
    assert out.getvalue() == (
        "c1 failed after 1.0 s: no\\nrun r1 completed\\r\\x1b[2J\\u2028[/red]\nsomething_new text=a\\nb\n"
    )


def test_the_picture_shows_what_a_client_says_as_it_is_and_in_one_line() -> None:
    progress = begun(Clock(), clients=1)
    progress.note("selected", 1, {"chosen": asked("c0"), "eligible": 1})
    height = len(drawn(progress))
    progress.note("outcome", 1, {"client": "c0", "outcome": "failed", "reason": FORGED, "seconds": 1.0})
    lines = drawn(progress, 120)
    assert len(lines) == height
    assert any("no\\nrun r1 completed\\r\\x1b[2J\\u2028[/red]" in line for line in lines)


def test_none_shows_nothing() -> None:
    out = io.StringIO()
    with Display("none", out) as report:
        report("run_finished", status="completed", rounds_completed=1)
    assert out.getvalue() == ""


def test_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"display mode must be one of auto, live, lines, none, found 'big'"):
        Display("big")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def drawn(progress: Progress, width: int = 80) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(panel(progress))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return [line.strip("│ ").rstrip() for line in lines]


def begun(clock: Clock, rounds: int = 4, clients: int = 3) -> Progress:
    progress = Progress(clock)
    progress.note("run_started", 0, {"run": "r1", "rounds": rounds, "clients_needed": clients})
    for number in range(clients):
        progress.note("client_connected", 0, {"client": f"c{number}", "num_examples": 10, "tags": {}})
    return progress


def test_the_picture_shows_round_phase_clients_and_the_metric_so_far() -> None:
    clock = Clock()
    progress = begun(clock)
    progress.note("selected", 1, {"chosen": asked("c0", "c1", "c2"), "eligible": 3})
    clock.now = 2.0
    progress.note("outcome", 1, {"client": "c0", "seconds": 1.5, "num_examples": 231, "metrics": {"loss": 0.41}, **OK})
    progress.note("outcome", 1, {"client": "c1", "outcome": "late", "reason": "after 2 s", "seconds": 2.0})
    progress.note("evaluated", 1, {"where": "server", "metrics": {"accuracy": 0.5}})
    progress.note("evaluated", 1, {"where": "server", "metrics": {"accuracy": 0.75}})
    lines = drawn(progress)
    assert "r1" in lines[0]
    assert lines[1].startswith("round 1 of 4")
    assert lines[1].endswith("training  2.0 s")
    assert lines[2] == "accuracy 0.75   ▁█ accuracy"
    assert lines[3] == "asked 3 clients: 1 ok   1 working   1 late"
    assert [line.split() for line in lines[4:7]] == [
        ["c0", "ok", "1.5", "s", "231", "examples,", "loss", "0.41"],
        ["c1", "late", "2.0", "s", "after", "2", "s"],
        ["c2", "working", "2.0", "s"],
    ]


def test_while_clients_are_missing_the_picture_says_how_many() -> None:
    progress = begun(Clock(), clients=3)
    progress.note("waiting", 1, {"connected": 3, "needed": 5})
    assert "waiting for clients, 3 of 5 connected" in drawn(progress)[1]


def test_with_many_clients_the_picture_stays_short_and_shows_trouble_first() -> None:
    progress = begun(Clock(), clients=200)
    clients = [f"c{number}" for number in range(200)]
    progress.note("selected", 1, {"chosen": asked(*clients), "eligible": 200})
    for client in clients[:50]:
        progress.note("outcome", 1, {"client": client, "seconds": 0.1, "num_examples": 1, "metrics": {}, **OK})
    progress.note("outcome", 1, {"client": "c60", "outcome": "failed", "reason": "no " * 100, "seconds": 0.1})
    progress.note("client_lost", 0, {"client": "c70", "reason": "silent"})
    lines = drawn(progress)
    assert len(lines) == 13
    assert "asked 200 clients: 50 ok   148 working   1 lost   1 failed" in lines
    assert [line.split()[0] for line in lines[3:5]] == ["c60", "c70"]
    assert lines[-2] == "and 192 more: 50 ok, 142 working"


def test_the_time_left_is_that_of_the_rounds_so_far() -> None:
    clock = Clock()
    progress = begun(clock, rounds=4)
    assert progress.left_s() is None
    for round in (1, 2):
        progress.note("selected", round, {"chosen": asked("c0"), "eligible": 3})
        clock.now += 10
        progress.note("round_finished", round, {"counted": 1, "asked": 1, "skipped": "", "seconds": 9.0})
    assert progress.left_s() == 20.0
    progress.note("selected", 3, {"chosen": asked("c0"), "eligible": 3})
    clock.now += 4
    assert progress.left_s() == 16.0
    clock.now += 100  # a round that takes longer than the others leaves the ones after it
    assert progress.left_s() == 10.0
    assert drawn(progress)[1].endswith("training  2:04, 10 s left")


ON_A_TERMINAL = """
import logging, sys
logging.basicConfig(stream=sys.stdout, level=logging.INFO)
from fedtrain.observe import Display

with Display() as report:
    assert report.mode == "live", report.mode
    report("run_started", run="r1", rounds=2, clients_needed=1)
    report("client_connected", client="c1", num_examples=3, tags={})
    logging.info("a log line")
    print("a printed line")
    if "raise" in sys.argv:
        raise RuntimeError("in the middle")
    report("run_finished", status="completed", rounds_completed=2, metrics={"accuracy": 0.5})
    report("client_lost", client="c1", reason="gone")
"""


def on_a_terminal(*arguments: str) -> str:
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        chunks = []
        try:
            while chunk := os.read(ours, 65536):
                chunks.append(chunk)
        except OSError:  # Linux: the other side is closed
            pass
        process.wait(timeout=30)
    os.close(ours)
    return b"".join(chunks).decode()


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
@pytest.mark.parametrize("argument", ["end", "raise"])
def test_the_terminal_has_its_cursor_back_also_after_an_exception(argument: str) -> None:
    text = on_a_terminal(argument)
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert text.count(hidden) == text.count(shown) == 1
    assert text.index(hidden) < text.index(shown)
    assert "INFO:root:a log line\r\n" in text
    assert "a printed line\r\n" in text
    end = text[text.index(shown) :]
    if argument == "raise":
        assert "RuntimeError: in the middle" in end
    else:
        assert "run completed: 2 rounds, accuracy 0.5\r\n" in end
        assert "round 0 of 2" not in end


def test_log_handlers_get_their_streams_back() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    handler = logging.StreamHandler(sys.__stdout__)
    logging.getLogger().addHandler(handler)
    try:
        display = Display("live", Terminal())
        display("run_started", run="r1", rounds=1)
        during = handler.stream
        display.close()
        assert during is not sys.__stdout__
        assert handler.stream is sys.__stdout__
    finally:
        logging.getLogger().removeHandler(handler)
