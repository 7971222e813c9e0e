"""The published results of FLamby's Fed-Heart-Disease, as whole numbers: how many test patients are classified right.

Ogier du Terrail et al., FLamby, NeurIPS 2022, arXiv:2210.04620; its results in commit edacf54 of owkin/FLamby.
"""

import csv
import os
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from commands import site
from torch import nn
from torch.nn import functional

from fedtrain.client.torch_trainer import TorchTrainer
from fedtrain.config import build_strategy, build_trainer, compose
from fedtrain.data import Split, heart_disease
from fedtrain.data.heart_disease import HOSPITALS
from fedtrain.evaluate import evaluation
from fedtrain.fleet import MemoryFleet
from fedtrain.random import generator
from fedtrain.rounds import first_state, run
from fedtrain.state import RunState
from fedtrain.training import cohort_settings, initial_model
from fedtrain.types import Start

DATA = Path(os.environ.get("FEDTRAIN_DATA", "../shared/data")).absolute()
FOLDER = DATA / "heart_disease"

pytestmark = pytest.mark.skipif(
    not (FOLDER / "flamby_published.csv").exists(),
    reason=f"{FOLDER} does not hold the data of Fed-Heart-Disease: set FEDTRAIN_DATA to the folder of all data sets",
)

METHODS = {
    "fedavg": "FedAvg100",
    "fedprox": "FedProx100",
    "scaffold": "Scaffold100",
    "fedadam": "FedAdam100",
    "fedyogi": "FedYogi100",
    "fedadagrad": "FedAdagrad100",
}
"""Names in the published table."""

SEEDS = range(42, 47)


@cache
def published() -> dict[tuple[str, int, str], tuple[int, int]]:
    """(method, seed, test set) -> (classified right, of how many)."""
    with open(FOLDER / "flamby_published.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    return {(row["method"], int(row["seed"]), row["test_set"]): (int(row["correct"]), int(row["rows"])) for row in rows}


def counts(strategy: str, seed: int, accuracy: Mapping[str, float]) -> dict[str, int]:
    """Accuracies as whole numbers of patients."""
    found = {name: value * published()[METHODS[strategy], seed, name][1] for name, value in accuracy.items()}
    assert all(abs(value - round(value)) < 1e-3 for value in found.values()), found
    return {name: round(value) for name, value in found.items()}


def expected(strategy: str, seed: int) -> dict[str, int]:
    """What is published for a run."""
    return {name: published()[METHODS[strategy], seed, name][0] for name in (*HOSPITALS, "pooled")}


def trained(*overrides: str) -> RunState:
    """The state after a run of the experiment in memory, configured as the commands would be."""
    config = compose(["experiment=flamby_heart", f"data.path={FOLDER}", *overrides])
    strategy, server = build_strategy(config), build_trainer(config, partition=None)
    fleet = MemoryFleet({name: build_trainer(config, partition=part) for part, name in enumerate(HOSPITALS)})
    first, settings = first_state(strategy, initial_model(config, server), config.seed), cohort_settings(config)
    measure = evaluation("both", every=15, rounds=config.rounds, trainer=server, settings=settings)
    return run(strategy, fleet, first, rounds=config.rounds, settings=settings, evaluate=measure)


@pytest.mark.parametrize("strategy", list(METHODS))
def test_five_runs_classify_exactly_as_many_patients_right_as_published(strategy: str) -> None:
    for seed in SEEDS:
        record = trained(f"strategy={strategy}", f"seed={seed}").history[-1]
        by_client = {name: metrics["accuracy"] for name, metrics in record.evaluation_by_client.items()}
        accuracy = {**by_client, "pooled": record.evaluation["accuracy"]}
        assert counts(strategy, seed, accuracy) == expected(strategy, seed), f"seed {seed}"


def test_the_torch_trainer_gives_the_published_counts_too() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(outputs[:, 0], targets.to(outputs.dtype))

    def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs[:, 0] > 0) == targets

    def trainer(data: Split) -> TorchTrainer:
        return TorchTrainer(
            partial(nn.Linear, 13, 1), data, loss=loss, metrics={"accuracy": accuracy}, device="cpu", threads=1
        )

    config = compose(["experiment=flamby_heart", "strategy=scaffold", "seed=43", f"data.path={FOLDER}"])
    strategy, start = build_strategy(config), Start(heart_disease.model(43, FOLDER).initial(generator(0)), {})
    data = {name: heart_disease.load(part, 4, 43, path=FOLDER) for part, name in enumerate(HOSPITALS)}
    clients = {name: trainer(split) for name, split in data.items()}
    settings = cohort_settings(config)
    state = run(strategy, MemoryFleet(clients), first_state(strategy, start, 43), rounds=15, settings=settings)
    everyone = {**clients, "pooled": trainer(heart_disease.load(None, 4, 43, path=FOLDER))}
    accuracy_of = {}
    for name, client in everyone.items():
        evaluated = client.evaluate(state.model)
        assert evaluated is not None
        accuracy_of[name] = evaluated.metrics["accuracy"]
    assert counts("scaffold", 43, accuracy_of) == expected("scaffold", 43)


@pytest.mark.parametrize("strategy", ["fedadam", "scaffold"])
def test_real_processes_classify_exactly_as_many_patients_right_as_published(tmp_path: Path, strategy: str) -> None:
    common = ("experiment=flamby_heart", f"strategy={strategy}", "seed=42", f"data.path={FOLDER}")
    with site(tmp_path, *common) as place:
        server = place.server()
        clients = [place.client(part, id=name) for part, name in enumerate(HOSPITALS)]
        assert server.wait() == 0, server.output
        assert [client.wait() for client in clients] == [0, 0, 0, 0]
        result = place.result
    metrics = result["final_metrics"]
    assert (result["status"], result["rounds_completed"]) == ("completed", 15)
    accuracy = {**metrics["accuracy_by_client"], "pooled": metrics["accuracy"]}
    assert counts(strategy, 42, accuracy) == expected(strategy, 42)
    assert result["model_digest"] == trained(f"strategy={strategy}", "seed=42").model_digest


def test_another_seed_gives_another_run_that_is_as_good() -> None:
    accuracy = [trained("strategy=fedadagrad", f"seed={seed}").history[-1].evaluation["accuracy"] for seed in (1, 2, 3)]
    assert len(set(accuracy)) > 1
    # 40 seeds of the original gave 0.7840 +- 0.0093 for one seed.
    assert sum(accuracy) / 3 == pytest.approx(0.784, abs=4 * 0.0093 / 3**0.5)
