import dataclasses

import pytest
from fedtrain.strategies import fedavg

from fedtrain import Strategy
from fedtrain.aggregation import (
    Aggregator,
    bucketing,
    bulyan,
    centred_clipping,
    equally,
    geometric_median,
    krum,
    median,
    multi_krum,
    nearest_neighbour_mixing,
    norm_bounding,
    normalised_mean,
    trimmed_mean,
    weighted_mean,
)
from fedtrain.config import build_strategy, compose
from fedtrain.errors import StrategyError
from fedtrain.local import CLIENT_HALVES, Local, feddyn, proximal, scaffold, sgd_epochs
from fedtrain.selection import Selector, uniform
from fedtrain.server_optimizers import Optimizer, sgd
from fedtrain.strategy import SLOTS
from fedtrain.transforms import Transform
from fedtrain.types import ClientInfo

CLIENT = ClientInfo("a", num_examples=10)


def test_a_strategy_needs_three_answers_and_has_six() -> None:
    strategy = Strategy(select=uniform(), local=sgd_epochs(), aggregate=weighted_mean())
    assert [field.name for field in dataclasses.fields(strategy)] == [
        "select",
        "local",
        "aggregate",
        "on_client",
        "on_server",
        "server_optimizer",
    ]
    assert strategy.on_client.spec == strategy.on_server.spec == ()
    assert strategy.server_optimizer.apply({"w": 1}, ())[0] == {"w": 1}  # type: ignore[dict-item]


def test_every_slot_has_a_kind_of_part_and_each_kind_its_slot() -> None:
    assert {
        "select": Selector,
        "local": Local,
        "aggregate": Aggregator,
        "on_client": Transform,
        "on_server": Transform,
        "server_optimizer": Optimizer,
    } == SLOTS
    assert set(SLOTS) == {field.name for field in dataclasses.fields(Strategy)}


@pytest.mark.parametrize("slot", list(SLOTS))
@pytest.mark.parametrize("wrong", [None, 3, sgd, weighted_mean, {"name": "uniform"}])
def test_a_slot_with_something_else_is_refused_by_name(slot: str, wrong: object) -> None:
    parts = {"select": uniform(), "local": sgd_epochs(), "aggregate": weighted_mean(), slot: wrong}
    expected = f"slot '{slot}' must be a {SLOTS[slot].__name__}, found {type(wrong).__name__}"
    with pytest.raises(StrategyError, match=expected):
        Strategy(**parts)  # type: ignore[arg-type]


def test_a_part_in_the_slot_of_another_is_refused() -> None:
    with pytest.raises(StrategyError, match="slot 'server_optimizer' must be a Optimizer, found Selector"):
        Strategy(uniform(), sgd_epochs(), weighted_mean(), server_optimizer=uniform())  # type: ignore[arg-type]


ROBUST = {
    "median": median(),
    "trimmed_mean": trimmed_mean(1),
    "krum": krum(1),
    "multi_krum": multi_krum(1),
    "bulyan": bulyan(1),
    "geometric_median": geometric_median(),
    "centred_clipping": centred_clipping(1.0),
    "norm_bounding": norm_bounding(),
    "mixing": nearest_neighbour_mixing(1, median()),
    "bucketing": bucketing(2, median()),
}


@pytest.mark.parametrize("local", [scaffold(), feddyn(0.1)], ids=["scaffold", "feddyn"])
@pytest.mark.parametrize("rule", ROBUST.values(), ids=ROBUST)
def test_a_local_algorithm_that_folds_every_update_is_refused_before_a_rule_that_rejects_some(
    local: Local, rule: Aggregator
) -> None:
    with pytest.raises(StrategyError, match=r"folds every update .* choose local=sgd_epochs or prox.*=weighted_mean"):
        Strategy(uniform(), local, rule)
    for plain in (sgd_epochs(), proximal(0.1)):
        Strategy(uniform(), plain, rule)


@pytest.mark.parametrize("local", [scaffold(), feddyn(0.1)], ids=["scaffold", "feddyn"])
@pytest.mark.parametrize("rule", [weighted_mean(), normalised_mean(), bucketing(2, weighted_mean())])
def test_a_local_algorithm_that_folds_every_update_fits_a_rule_that_counts_them_all(
    local: Local, rule: Aggregator
) -> None:
    assert Strategy(uniform(), local, rule).aggregate.uses_all


def test_a_slot_is_replaced_in_a_copy() -> None:
    first = fedavg.build()
    second = dataclasses.replace(first, aggregate=weighted_mean(equally))
    assert second.aggregate.weight is equally
    assert first.aggregate.weight is not equally
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.aggregate = second.aggregate  # type: ignore[misc]


def test_fedavg_hands_its_numbers_to_the_parts() -> None:
    strategy = fedavg.build(fraction=0.5, epochs=3, learning_rate=0.1, batch_size=8)
    numbers = {"epochs": 3, "learning_rate": 0.1, "batch_size": 8}
    assert strategy.local.task((), CLIENT, 1) == ("sgd_epochs", numbers)
    assert fedavg.build().local.task((), CLIENT, 1) == ("sgd_epochs", {"epochs": 1})


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"epochs": 0}, "epochs must be > 0 and finite, found 0"),
        ({"learning_rate": -0.1}, "learning_rate must be > 0 and finite, found -0.1"),
        ({"learning_rate": float("nan")}, "learning_rate must be > 0 and finite, found nan"),
        ({"batch_size": 0}, "batch_size must be > 0 and finite, found 0"),
    ],
)
def test_impossible_numbers_of_the_local_algorithm_are_refused(numbers: dict[str, float], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        sgd_epochs(**numbers)  # type: ignore[arg-type]


def test_plain_local_training_keeps_nothing_and_corrects_nothing() -> None:
    local, half = sgd_epochs(), CLIENT_HALVES["sgd_epochs"]
    assert (local.init({}), local.payload(()), local.finish((), None, None)) == ((), {}, ())  # type: ignore[arg-type]
    gradient = {"w": 1.0}
    assert half.correct(gradient, {}, {}, {}, (), {}) is gradient
    assert half.finish({}, {}, {}, (), {}) == ({}, ())


def test_slots_of_a_configuration_are_replaced_together() -> None:
    def built(*overrides: str) -> Strategy:
        return build_strategy(compose(["experiment=quickstart_numpy", *overrides]))

    assert built("strategy=fedmedian", "local=scaffold", "aggregation=weighted_mean").local.folds_updates
    assert not built("strategy=scaffold", "local=sgd_epochs", "aggregation=median").aggregate.uses_all
    with pytest.raises(StrategyError, match="slots 'local' and 'aggregate' do not fit together"):
        built("strategy=scaffold", "aggregation=median")
