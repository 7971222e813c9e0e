"""What every strategy in strategies/ keeps to, and every server optimizer: one table, the same checks."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import fedtrain.strategies
import numpy as np
import pytest
import torch
from fakes import people
from lines import numpy_line, pair
from resnet import ResNet18

import fedtrain.server_optimizers
from fedtrain import Strategy
from fedtrain.aggregation import equally, weighted_mean
from fedtrain.check import checked
from fedtrain.client.torch_trainer import TorchTrainer
from fedtrain.config import build_strategy, compose
from fedtrain.data import Examples, Split
from fedtrain.fleet import MemoryFleet
from fedtrain.local import CLIENT_HALVES, sgd_epochs
from fedtrain.params import BFLOAT16, digest, is_float
from fedtrain.plan import CohortSettings, plan, start_of
from fedtrain.rounds import first_state, run, step
from fedtrain.selection import uniform
from fedtrain.server_optimizers import Optimizer
from fedtrain.state import RunState
from fedtrain.types import Array, Outcome, Params, Start, Task, Update

FOLDER = Path(str(fedtrain.strategies.__path__[0]))
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
OPTIMIZERS = sorted(name for name in fedtrain.server_optimizers.__all__ if name != "Optimizer")


def built(name: str) -> Strategy:
    """A strategy of the folder with its own defaults; `optimizer:` and a name: averaging with that optimizer."""
    if name.startswith("optimizer:"):
        optimizer: Optimizer = getattr(fedtrain.server_optimizers, name.partition(":")[2])()
        return Strategy(uniform(), sgd_epochs(), weighted_mean(equally), server_optimizer=optimizer)
    strategy: Strategy = import_module(f"fedtrain.strategies.{name}").build()
    return strategy


EVERY = [*NAMES, *(f"optimizer:{name}" for name in OPTIMIZERS)]
every_strategy = pytest.mark.parametrize("name", EVERY)
# What a rule does that needs several updates is in test_aggregators.py.
for_any_cohort = pytest.mark.parametrize("name", [name for name in EVERY if built(name).aggregate.min_updates == 1])

PARAMS: Params = {
    "w": np.array([[1.0, -2.0], [0.5, 4.0]], np.float32),
    "half": np.array([1.0, -0.25], np.float16),
    "brain": np.array([2.0, -8.0], BFLOAT16),
    "double": np.array([0.1, 0.2, 0.3]),
    "scalar": np.array(3.0, np.float32),
    "empty": np.zeros((0, 3), np.float32),
}
BUFFERS: Params = {
    "running_mean": np.array([0.5, -0.5], np.float32),
    "num_batches_tracked": np.array(7),
    "mask": np.array([True, False, True]),
    "none": np.zeros(0, np.int32),
}
MODEL = Start(PARAMS, BUFFERS)


def first(strategy: Strategy, model: Start = MODEL) -> RunState:
    return first_state(strategy, model, seed=1)


def like(arrays: Params, value: Callable[[str, Array], Any]) -> dict[str, Array]:
    return {
        name: np.array(np.broadcast_to(value(name, array), array.shape), array.dtype) for name, array in arrays.items()
    }


def update(strategy: Strategy, state: RunState, task: Task, size: float, num_examples: int) -> Update:
    """Floats move by `size`, the counter by 2, the mask turns round; a second payload of that size if there is one."""
    start = start_of(strategy, state)
    delta = like(start.params, lambda name, array: size)
    for name, array in start.buffers.items():
        changed = array + size if is_float(array) else ~array if array.dtype == np.bool_ else array + 2
        delta[name] = np.asarray(changed - array if is_float(array) else changed, array.dtype)
    extra = like(strategy.local.extra(start), lambda name, array: size)
    return Update(task, delta, num_examples, min(1, num_examples), {}, extra)


def after_round(strategy: Strategy, state: RunState, *updates: tuple[str, float, int]) -> RunState:
    """The state after a round in which clients send updates of this (client, size, number of examples)."""
    clients = [replace(info, num_examples=n) for (client, _, n) in updates for info in people(client)]
    cohort = plan(strategy, state, clients, CohortSettings(), start_of(strategy, state))
    by_client = {client: (size, n) for client, size, n in updates}
    outcomes = []
    for task in cohort.tasks:
        sent = update(strategy, state, task, *by_client[task.client])
        outcome = Outcome(task, "ok", sent, {}, sent.num_examples)
        start = start_of(strategy, state)
        outcomes.append(checked(outcome, start, cohort, strategy.local.extra(start)))
    return step(strategy, state, cohort, outcomes)


def memory_digest(state: RunState) -> str:
    """Of all arrays of a state: model and memories."""
    arrays: dict[str, Array] = dict(state.model)

    def collect(value: Any, path: str) -> None:
        if isinstance(value, np.ndarray):
            arrays[path] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                collect(item, f"{path}/{key}")
        else:
            arrays[path] = np.frombuffer(repr(value).encode(), np.uint8)

    for part in ("selection", "local", "on_server", "server_optimizer"):
        collect(getattr(state, part), f" {part}")
    return digest(arrays)


@for_any_cohort
def test_names_shapes_and_dtypes_are_kept_also_of_empty_arrays_and_those_without_dimensions(name: str) -> None:
    strategy = built(name)
    state = first(strategy)
    for _ in range(3):
        state = after_round(strategy, state, ("a", 0.25, 1), ("b", -0.5, 3))
        assert not state.history[-1].skipped
    for arrays, before in ((state.params, PARAMS), (state.buffers, BUFFERS)):
        assert {key: (array.shape, array.dtype) for key, array in arrays.items()} == {
            key: (array.shape, array.dtype) for key, array in before.items()
        }
    assert all((state.params[key] != PARAMS[key]).all() for key in PARAMS)


@for_any_cohort
def test_buffers_come_from_the_mean_and_skip_the_server_optimizer(name: str) -> None:
    strategy = built(name)
    state = after_round(strategy, first(strategy), ("a", 0.5, 1), ("b", 0.5, 3))
    assert state.buffers["running_mean"].tolist() == [1.0, 0.0]
    assert state.buffers["num_batches_tracked"] == 9
    assert state.buffers["mask"].tolist() == [False, True, False]


@for_any_cohort
def test_identical_clients_are_one_client(name: str) -> None:
    strategy = built(name)
    one = after_round(strategy, first(strategy), ("a", 0.25, 4))
    three = after_round(strategy, first(strategy), ("a", 0.25, 4), ("b", 0.25, 4), ("c", 0.25, 4))
    for key in one.model:
        np.testing.assert_array_equal(three.model[key], one.model[key])


@for_any_cohort
def test_deltas_of_zero_leave_a_new_model_as_it_is(name: str) -> None:
    strategy = built(name)
    state = after_round(strategy, first(strategy), ("a", 0.0, 1), ("b", 0.0, 3))
    assert not state.history[-1].skipped
    assert digest(state.params) == digest(PARAMS)


@for_any_cohort
def test_the_model_moves_where_the_clients_went(name: str) -> None:
    strategy = built(name)
    state = after_round(strategy, first(strategy), ("a", 0.25, 1), ("b", 0.5, 3))
    for key, array in state.params.items():
        assert (array > PARAMS[key]).all(), key


@for_any_cohort
def test_the_old_state_is_not_changed(name: str) -> None:
    strategy = built(name)
    state = after_round(strategy, first(strategy), ("a", 0.25, 1), ("b", 0.5, 3))
    before = memory_digest(state)
    after_round(strategy, state, ("a", 0.25, 1), ("b", 0.5, 3))
    assert memory_digest(state) == before


@for_any_cohort
def test_an_update_that_is_not_finite_is_as_if_it_had_not_come(name: str) -> None:
    strategy = built(name)
    refused = after_round(strategy, first(strategy), ("a", 0.25, 2), ("b", 0.5, 2), ("c", 0.75, -1))
    for bad in (float("nan"), float("inf")):
        poisoned = after_round(strategy, first(strategy), ("a", 0.25, 2), ("b", 0.5, 2), ("c", bad, 2))
        assert (poisoned.history[-1].num_ok, poisoned.history[-1].num_asked) == (2, 3)
        assert memory_digest(poisoned) == memory_digest(refused)
        assert all(np.isfinite(array.astype(np.float64)).all() for array in poisoned.params.values())


@for_any_cohort
def test_huge_and_tiny_weights_give_a_finite_model(name: str) -> None:
    strategy = built(name)
    state = after_round(strategy, first(strategy), ("a", 0.25, 2**53), ("b", 0.25, 1))
    assert not state.history[-1].skipped
    assert all(np.isfinite(array.astype(np.float64)).all() for array in state.params.values())


@for_any_cohort
def test_too_few_answers_leave_model_and_memory_as_they_were(name: str) -> None:
    strategy = built(name)
    state = after_round(strategy, first(strategy), ("a", 0.25, 1), ("b", 0.5, 3))
    skipped = after_round(strategy, state, ("a", float("nan"), 1), ("b", float("nan"), 3))
    assert skipped.history[-1].skipped
    assert memory_digest(replace(skipped, selection=state.selection)) == memory_digest(state)


@every_strategy
def test_a_round_with_fewer_answers_than_the_rule_needs_is_skipped_and_the_least_number_is_enough(name: str) -> None:
    strategy = built(name)
    least = strategy.aggregate.min_updates
    answers = [(f"c{number}", 0.25 * number, number) for number in range(1, least + 1)]
    moved = after_round(strategy, first(strategy), *answers)
    assert not moved.history[-1].skipped
    assert digest(moved.params) != digest(PARAMS)
    if least > 1:
        skipped = after_round(strategy, first(strategy), *answers[:-1])
        assert f"{least} are needed" in skipped.history[-1].skipped
        assert digest(skipped.params) == digest(PARAMS)


@for_any_cohort
def test_its_memory_is_arrays_numbers_text_tuples_and_mappings(name: str) -> None:
    strategy = built(name)
    state = after_round(strategy, first(strategy), ("a", 0.25, 1), ("b", 0.5, 3))

    def check(value: Any) -> None:
        if isinstance(value, Mapping):
            assert all(isinstance(key, str) for key in value)
            for item in value.values():
                check(item)
        elif isinstance(value, tuple):
            for item in value:
                check(item)
        else:
            assert type(value) in (np.ndarray, int, float, str, bool), type(value)

    for part in ("selection", "local", "on_server", "server_optimizer"):
        check(getattr(state, part))


# Whole runs of five clients with a line each


POINTS = {
    "a": ((1.0, 2.0), (0.5, 1.0)),
    "b": ((2.0, -1.0),),
    "c": ((-1.0, 0.5),),
    "d": ((0.5, 3.0),),
    "e": ((1.5, 1.0),),
}


def fleet() -> MemoryFleet:
    return MemoryFleet({name: numpy_line(*points) for name, points in POINTS.items()})


class Backwards(MemoryFleet):
    """Answers in the opposite order."""

    def give(self, tasks: Any, start: Start) -> None:
        super().give(tasks[::-1], start)


def trained(strategy: Strategy, on: MemoryFleet, state: RunState, rounds: int) -> RunState:
    return run(strategy, on, state, rounds=rounds, settings=CohortSettings())


@every_strategy
def test_the_order_in_which_clients_answer_does_not_matter(name: str) -> None:
    strategy = built(name)
    state = first(strategy, Start(pair(0, 0), {}))
    backwards = Backwards({name: numpy_line(*points) for name, points in POINTS.items()})
    assert memory_digest(trained(strategy, backwards, state, 5)) == memory_digest(trained(strategy, fleet(), state, 5))


@every_strategy
def test_going_on_from_a_state_equals_never_having_stopped(name: str) -> None:
    strategy, clients = built(name), fleet()
    state = first(strategy, Start(pair(0, 0), {}))
    straight = trained(strategy, fleet(), state, 8)
    half = trained(strategy, clients, state, 4)
    again = trained(built(name), clients, half, 8)
    assert memory_digest(again) == memory_digest(straight)
    assert (again.next_task, again.history) == (straight.next_task, straight.history)
    places = [digest(trained(strategy, fleet(), state, rounds).params) for rounds in (4, 8)]
    assert all(one != other for one, other in pairwise(places))


@for_any_cohort
def test_one_client_learns(name: str) -> None:
    strategy = built(name)
    line = numpy_line((1.0, 2.0), (2.0, 3.5))
    state = trained(strategy, MemoryFleet({"a": line}), first(strategy, Start(pair(0, 0), {})), 30)
    inputs, targets = np.array([[1.0], [2.0]]), np.array([[2.0], [3.5]])
    loss = [line._model.loss_and_gradient(params, inputs, targets)[0] for params in (pair(0, 0), state.params)]
    assert loss[1] < 0.5 * loss[0]


# A network with batch normalisation


def test_a_resnet_has_the_arrays_of_resnet_18() -> None:
    module = ResNet18(num_classes=1000)
    assert sum(parameter.numel() for parameter in module.parameters()) == 11_689_512
    assert len(module.state_dict()) == 122


@for_any_cohort
def test_a_resnet_is_trained_with_its_statistics_and_loads_again(name: str) -> None:
    random, make = np.random.default_rng(0), partial(ResNet18, num_classes=2, in_channels=1, width=4)
    trainers = {}
    for number, client in enumerate("ab"):
        images = Examples(random.normal(number, 1, (5, 1, 16, 16)).astype(np.float32), np.array([0, 1, 0, 1, 0]))
        options: dict[str, Any] = {"batch_size": 2, "learning_rate": 0.05, "device": "cpu", "threads": 1}
        trainers[client] = TorchTrainer(make, Split(images, None), **options)
    strategy, start = built(name), trainers["a"].initial(0)
    state = trained(strategy, MemoryFleet(trainers), first(strategy, start), 2)
    assert [record.skipped for record in state.history] == ["", ""]

    arrays = state.model
    module = make()
    module.load_state_dict({key: torch.from_numpy(array.copy()) for key, array in arrays.items()}, strict=True)
    assert all(tensor.dtype == torch.from_numpy(arrays[key]).dtype for key, tensor in module.state_dict().items())
    counters = [array for key, array in arrays.items() if key.endswith("num_batches_tracked")]
    assert len(counters) == 20
    assert all((array == 4).all() for array in counters)  # 5 images in batches of 2 and 3, in each of 2 rounds
    variances = [array for key, array in arrays.items() if key.endswith("running_var")]
    assert all((array > 0).all() and not (array == 1).all() for array in variances)


# The folders


def test_every_strategy_has_a_configuration_with_its_own_defaults() -> None:
    for name in NAMES:
        chosen, own = build_strategy(compose([f"strategy={name}"])), built(name)
        state, client = chosen.local.init({}), people("a")[0]
        assert chosen.local.task(state, client, 1) == own.local.task(state, client, 1)
        for strategy in (chosen, own):
            assert strategy.local.task(state, client, 1)[0] in CLIENT_HALVES
        five = [(client, 0.25 * number, number) for number, client in enumerate("abcde", start=1)]
        ends = [after_round(strategy, first(strategy), *five) for strategy in (chosen, own)]
        assert not ends[0].history[-1].skipped
        assert memory_digest(ends[0]) == memory_digest(ends[1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_a_configuration_with_its_own_defaults(name: str) -> None:
    chosen, own = build_strategy(compose([f"server_optimizer={name}"])), built(f"optimizer:{name}")
    chosen = replace(chosen, aggregate=own.aggregate)
    ends = [after_round(strategy, first(strategy), ("a", 0.25, 1), ("b", 0.5, 3)) for strategy in (chosen, own)]
    assert memory_digest(ends[0]) == memory_digest(ends[1])


def test_every_strategy_is_short_and_cites_its_source() -> None:
    for name in NAMES:
        text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 40, name
        assert "arXiv:" in text.split('"""')[1], name
