"""How a run ends when it is interrupted, also more than once."""

import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import fedtrain.training
from fedtrain.config import build_strategy, build_trainer, compose
from fedtrain.fleet.memory import MemoryFleet
from fedtrain.params import write_file
from fedtrain.training import Training, initial_model
from fedtrain.types import ClientInfo

SIGNALS = [signal.SIGINT, signal.SIGTERM]


class Interrupted(MemoryFleet):
    """A fleet during whose first use Ctrl-C is pressed."""

    def clients(self) -> Sequence[ClientInfo]:
        raise KeyboardInterrupt


@pytest.fixture
def raising() -> Iterator[None]:
    """Both signals raise KeyboardInterrupt, as the commands have it."""
    before = [signal.signal(number, signal.default_int_handler) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("raising")
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(("fleet", "status"), [(Interrupted, "stopped"), (MemoryFleet, "completed")])
def test_an_interrupt_while_a_run_ends_does_not_change_how_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, fleet: type[MemoryFleet], status: str
) -> None:
    config = compose(["experiment=quickstart_numpy", "data.num_partitions=1", "rounds=1", "display=none"])
    trainer = build_trainer(config, partition=None)

    def interrupted_write(*arguments: Any) -> None:
        signal.raise_signal(number)
        write_file(*arguments)

    monkeypatch.setattr(fedtrain.training, "write_file", interrupted_write)
    try:
        with Training(
            config, build_strategy(config), trainer, initial_model(config, trainer), tmp_path, run="r"
        ) as run:
            ended = run.train(fleet({"client-0": build_trainer(config, partition=0)}), address="")
            signal.raise_signal(number)  # as while a server tells its clients
    except KeyboardInterrupt:
        ended = "failed"
    assert ended == status
    assert json.loads((tmp_path / "result.json").read_text())["status"] == status
    last = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["status"]) == ("run_finished", status)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
