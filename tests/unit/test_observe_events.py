"""Events: one JSON object per line, told to all listeners, and never the end of a run."""

import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtrain.observe.events import Events, jsonable


def lines_of(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_event_is_a_line_with_its_time_name_and_round_first(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    before = datetime.now(UTC)
    with Events(path) as report:
        report("run_started", run="r1")
        report("outcome", 3, client="c1", outcome="ok")
        first, second = lines_of(path)  # written out before the file is closed
    assert list(first) == ["time", "event", "round", "run"]
    assert (first["event"], first["round"], first["run"]) == ("run_started", 0, "r1")
    assert {**second, "time": ""} == {"time": "", "event": "outcome", "round": 3, "client": "c1", "outcome": "ok"}
    times = [datetime.fromisoformat(line["time"]) for line in (first, second)]
    assert before <= times[0] <= times[1] <= datetime.now(UTC)
    assert times[0].utcoffset() is not None
    assert len(first["time"]) == len("2026-01-01T00:00:00.000000+00:00")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.array([1, 2]), [1, 2]),
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
        (np.float64("-inf"), "-Infinity"),
        ({1: (float("nan"), {"a"})}, {"1": ["NaN", ["a"]]}),
        (Path("a/b"), "a/b"),
        (None, None),
    ],
)
def test_values_become_strict_json(value: object, expected: object) -> None:
    found = jsonable(value)
    assert found == expected
    assert type(found) is type(expected)


def test_a_file_that_is_there_is_continued_also_behind_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "a"}\n{"eve')
    with Events(path) as report:
        report("b")
    whole, torn, new = path.read_text().splitlines()
    assert (whole, torn) == ('{"event": "a"}', '{"eve')
    assert json.loads(new)["event"] == "b"
    with Events(path) as report:
        report("c")
    assert len(path.read_text().splitlines()) == 4


def test_listeners_hear_every_event_as_it_was_reported(tmp_path: Path) -> None:
    heard: list[object] = []

    def listen(event: str, round: int = 0, **fields: object) -> None:
        heard.append((event, round, fields))

    with Events(tmp_path / "events.jsonl", [listen, listen]) as report:
        report("evaluated", 2, metrics={"loss": 0.5})
    assert heard == 2 * [("evaluated", 2, {"metrics": {"loss": 0.5}})]


def test_a_listener_that_fails_is_told_once_and_stops_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = []

    def broken(event: str, round: int = 0, **fields: object) -> None:
        raise RuntimeError("no screen")

    def listen(event: str, round: int = 0, **fields: object) -> None:
        heard.append(event)

    with Events(tmp_path / "events.jsonl", [broken, listen]) as report:
        report("a")
        report("b")
    assert heard == ["a", "b"]
    assert [line["event"] for line in lines_of(tmp_path / "events.jsonl")] == ["a", "b"]
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "broken failed on event 'a': RuntimeError: no screen" in told


def test_a_full_disk_does_not_stop_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    heard = []
    report = Events(full, [lambda event, round=0, **fields: heard.append(event)])
    report("a")
    report("b")
    report.close()
    assert heard == ["a", "b"]
    assert capsys.readouterr().err.count("an event could not be written") == 1


def test_events_from_many_threads_are_whole_lines(tmp_path: Path) -> None:
    with Events(tmp_path / "events.jsonl") as report:

        def tell(thread: int) -> None:
            for round in range(50):
                report("outcome", round, client=f"c{thread}", text="x" * 500)

        threads = [threading.Thread(target=tell, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = lines_of(tmp_path / "events.jsonl")
    for number in range(4):
        assert [line["round"] for line in lines if line["client"] == f"c{number}"] == list(range(50))


def test_after_closing_only_listeners_hear(tmp_path: Path) -> None:
    heard = []
    report = Events(tmp_path / "events.jsonl", [lambda event, round=0, **fields: heard.append(event)])
    report("a")
    report.close()
    report("b")
    assert heard == ["a", "b"]
    assert [line["event"] for line in lines_of(tmp_path / "events.jsonl")] == ["a"]
