"""Local algorithms on a line through one point, x = 2, y = 1: the error is e = 2 * weight + bias - 1, the gradient
(4 e, 2 e). From (1, 0), e = 1. All numbers are exact in float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lines import both, numbers, numpy_line, pair

from fedtrain import Strategy
from fedtrain.aggregation import by_examples, equally, normalised_mean, weighted_mean
from fedtrain.client.trainer import Evaluated, Fitted, Trainer, Work
from fedtrain.errors import AggregationError, StrategyError
from fedtrain.fleet import MemoryFleet
from fedtrain.local import CLIENT_HALVES, Local, feddyn, proximal, scaffold, sgd_epochs
from fedtrain.params import digest
from fedtrain.plan import CohortSettings, plan, start_of
from fedtrain.rounds import first_state, run
from fedtrain.selection import uniform
from fedtrain.state import RunState
from fedtrain.testing import cohort_of, task_of
from fedtrain.types import ClientInfo, Outcome, Params, Start, Task, Update

CLIENT = ClientInfo("a", num_examples=10)
TWO_STEPS: dict[str, Any] = {"steps": 2, "learning_rate": 0.125}


def fitted(trainer: Trainer, local: Local, *, state: Any = (), payload: Params | None = None) -> Fitted:
    """What a client gives that starts at (1, 0)."""
    spec = local.task(local.init(pair(0, 0)), CLIENT, 1)
    return trainer.fit(Start(pair(1, 0), {}, payload or {}), Work(1, spec, seed=0, client_state=state))


# The client's halves


def test_the_proximal_term_pulls_towards_the_start() -> None:
    # Step 1 has no pull: (1 - 4/8, -2/8) = (0.5, -0.25). Then e = -0.25: gradient (-1, -0.5) + 2 * (-0.5, -0.25)
    for trainer in both((2, 1)):
        assert numbers(fitted(trainer, proximal(2.0, **TWO_STEPS)).model) == (0.75, -0.125)
        assert numbers(fitted(trainer, sgd_epochs(**TWO_STEPS)).model) == (0.625, -0.1875)


def test_without_a_pull_proximal_is_plain_training_bit_for_bit() -> None:
    for trainer in both((2, 1), (0.3, -0.7), (-1.1, 0.9)):
        spec: dict[str, Any] = {"epochs": 7, "learning_rate": 0.037, "batch_size": 2}
        plain, pulled = fitted(trainer, sgd_epochs(**spec)), fitted(trainer, proximal(0.0, **spec))
        assert digest(pulled.model) == digest(plain.model)
        assert digest(fitted(trainer, proximal(1e-3, **spec)).model) != digest(plain.model)

    # A gradient of -0.0 stays one: adding a pull of zero would make 0.0 of it.
    gradient = pair(-0.0, 1)
    assert CLIENT_HALVES["proximal"].correct(gradient, pair(1, 1), pair(0, 0), {}, (), {"mu": 0.0}) is gradient


def test_scaffold_steps_along_the_gradient_without_the_clients_control_and_with_the_servers() -> None:
    # c - c_k = (-2, -0.5). Step 1: (4, 2) + (-2, -0.5), so (0.75, -0.1875); e = 0.3125.
    # Step 2: (1.25, 0.625) + (-2, -0.5) = (-0.75, 0.125). The mean of the two own gradients is (2.625, 1.3125).
    for trainer in both((2, 1)):
        state, c = {"control": pair(3, 1)}, pair(1, 0.5)
        got = fitted(trainer, scaffold(**TWO_STEPS), state=state, payload=c)
        assert numbers(got.model) == (0.84375, -0.203125)
        assert numbers(got.client_state["control"]) == (2.625, 1.3125)
        assert numbers(got.extra) == (-0.375, 0.3125)
        assert numbers(state["control"]) == (3, 1)


def test_a_clients_first_control_is_the_mean_gradient_of_its_steps() -> None:
    # plain steps from (1, 0): gradients (4, 2) and (-1, -0.5)
    for trainer in both((2, 1)):
        got = fitted(trainer, scaffold(**TWO_STEPS), payload=pair(0, 0))
        assert numbers(got.model) == (0.625, -0.1875)
        assert numbers(got.client_state["control"]) == numbers(got.extra) == (1.5, 0.75)


def test_with_option_one_the_control_is_the_gradient_of_all_examples_at_the_start() -> None:
    # y = 1 and y = -1 at x = 2: errors 1 and 3, mean gradient (8, 4), whatever the steps were
    for trainer in both((2, 1), (2, -1)):
        local = scaffold(**TWO_STEPS, batch_size=1, option=1)
        got = fitted(trainer, local, state={"control": pair(3, 1)}, payload=pair(1, 0.5))
        assert numbers(got.client_state["control"]) == (8, 4)
        assert numbers(got.extra) == (5, 3)
        assert numbers(fitted(trainer, local, payload=pair(0, 0)).extra) == (8, 4)


def test_feddyn_tilts_the_loss_by_what_the_client_remembers_and_pulls_towards_the_start() -> None:
    # Step 1: (4, 2) - (1, 0.5), so (0.625, -0.1875); e = 0.0625.
    # Step 2: (0.25, 0.125) - (1, 0.5) + 2 * (-0.375, -0.1875) = (-1.5, -0.75), so (0.8125, -0.09375)
    for trainer in both((2, 1)):
        got = fitted(trainer, feddyn(2.0, **TWO_STEPS), state={"h": pair(1, 0.5)})
        assert numbers(got.model) == (0.8125, -0.09375)
        assert numbers(got.client_state["h"]) == (1 + 2 * 0.1875, 0.5 + 2 * 0.09375)
        assert got.extra == {}
        first = fitted(trainer, feddyn(2.0, **TWO_STEPS))
        assert numbers(first.client_state["h"]) == (
            2 * (1 - first.model["weight"].item()),
            -2 * first.model["bias"].item(),
        )


# The server's halves


def finished(local: Local, state: Any, *sent: tuple[str, Params, Params], num_eligible: int = 2) -> Any:
    """The server's state after a round in which these clients sent (delta, extra)."""
    acc, tasks = None, []
    for number, (client, delta, extra) in enumerate(sent):
        info = ClientInfo(client, {"a": 10, "b": 30}[client])
        tasks.append(task_of(number, client, local=local.task(state, info, 1)))
        acc = local.fold(acc, Update(tasks[-1], delta, info.num_examples, 1, {}, extra))
    cohort = cohort_of(0, tasks=tuple(tasks), num_eligible=num_eligible, eligible_examples=20 * num_eligible)
    return local.finish(state, acc, cohort)


def test_the_servers_control_is_the_mean_over_all_clients_not_only_those_that_answered() -> None:
    local = scaffold()
    state = finished(local, local.init(pair(0, 0)), ("a", {}, pair(4, 8)), num_eligible=4)
    assert numbers(local.payload(state)) == (1, 2)
    state = finished(local, state, ("a", {}, pair(2, 0)), ("b", {}, pair(2, 4)), num_eligible=1)
    assert numbers(local.payload(state)) == (2, 3)  # (4 + 2 + 2, 8 + 4) / 4, though only one is connected now


def test_the_servers_control_can_be_weighted_by_examples() -> None:
    local = scaffold(weight=by_examples)
    state = finished(local, local.init(pair(0, 0)), ("a", {}, pair(4, 8)), ("b", {}, pair(8, 4)))
    assert numbers(local.payload(state)) == (7, 5)  # (10 * 4 + 30 * 8) / 40, (10 * 8 + 30 * 4) / 40


def test_a_client_keeps_the_weight_that_it_had_at_first() -> None:
    local = scaffold(weight=by_examples)
    state = finished(local, local.init(pair(0, 0)), ("a", {}, pair(4, 8)))
    assert local.task(state, ClientInfo("a", 99), 2)[1]["weight"] == 10
    assert local.task(state, ClientInfo("b", 99), 2)[1]["weight"] == 99
    assert scaffold().task(state, ClientInfo("b", 99), 2)[1]["weight"] == 1


def test_more_clients_than_were_ever_connected_at_once_are_all_counted() -> None:
    local = scaffold()
    state = finished(local, local.init(pair(0, 0)), ("a", {}, pair(4, 0)), num_eligible=1)
    state = finished(local, state, ("b", {}, pair(4, 4)), num_eligible=1)
    assert numbers(local.payload(state)) == (4, 2)


def test_a_client_without_examples_sends_nothing_and_changes_nothing() -> None:
    local = scaffold()
    state = finished(local, local.init(pair(0, 0)), ("a", {}, {}), ("b", {}, pair(2, 4)))
    assert numbers(local.payload(state)) == (1, 2)


def test_controls_travel_in_the_models_dtype_and_are_summed_in_a_wider_one() -> None:
    local, params = scaffold(), {"w": np.zeros(1, np.float16)}
    state = local.init(params)
    assert state["sum"]["w"].dtype == np.float32
    assert local.payload(state)["w"].dtype == np.float16
    assert local.extra(Start(params, {})) is params


def test_a_sum_of_controls_that_overflows_skips_the_round() -> None:
    local = scaffold()
    state = {**local.init(pair(0, 0)), "sum": pair(3e38, 0)}
    with pytest.raises(AggregationError, match="sum of what clients keep for 'weight' is beyond float32"):
        finished(local, state, ("a", {}, pair(1e38, 0)))


def test_feddyn_moves_the_model_against_what_clients_remember() -> None:
    # h = -alpha * (d_a + d_b) / m: over 4 clients, -2 * (3 + 1, 2 - 2) / 4 = (-2, 0)
    local = feddyn(2.0)
    state = finished(local, local.init(pair(0, 0)), ("a", pair(3, 2), {}), ("b", pair(1, -2), {}), num_eligible=4)
    assert numbers(local.adjust(state, pair(2, 0))) == (2 + 1, 0)  # the mean delta minus h / alpha
    state = finished(local, state, ("a", pair(1, 1), {}), num_eligible=4)
    assert numbers(local.adjust(state, pair(1, 1))) == (1 + 1.25, 1 + 0.25)  # h = (-2, 0) - 2 * (1, 1) / 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: proximal(-1.0), "mu must be >= 0 and finite, found -1.0"),
        (lambda: proximal(float("nan")), "mu must be >= 0 and finite, found nan"),
        (lambda: feddyn(0.0), "alpha must be > 0 and finite, found 0.0"),
        (lambda: scaffold(option=3), "option must be 1 or 2, found 3"),
        (lambda: scaffold(weight=lambda update, cohort: 1.0), "weight must be equally or by_examples"),
        (lambda: feddyn(1.0, weight=lambda update, cohort: 1.0), "weight must be equally or by_examples"),
        (lambda: proximal(1.0, steps=0), "local proximal: steps must be > 0 and finite, found 0"),
        (lambda: scaffold(float("inf")), "local scaffold: epochs must be > 0 and finite, found inf"),
        (lambda: feddyn(1.0, batch_size=-1), "local feddyn: batch_size must be > 0 and finite, found -1"),
    ],
)
def test_impossible_numbers_are_refused(make: Callable[[], Local], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        make()


# Whole runs


POINTS = {"a": (1.0, 2.0), "b": (2.0, -1.0), "c": (-1.0, 0.5), "d": (0.5, 3.0)}


def best() -> tuple[float, float]:
    """The line of least squares through all points: where the clients' mean loss is smallest."""
    x, y = np.array(list(POINTS.values())).T
    weight, bias = np.polyfit(x, y, 1)
    return float(weight), float(bias)


class Watched:
    """A trainer that notes what its local algorithm will remember."""

    local_algorithms = ("sgd_epochs", "proximal", "scaffold", "feddyn")

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.num_examples, self.seen = trainer, trainer.num_examples, dict[int, Any]()

    def initial(self, seed: int) -> Start:
        return self.trainer.initial(seed)

    def fit(self, start: Start, work: Work) -> Fitted:
        result = self.trainer.fit(start, work)
        self.seen[work.round] = result.client_state
        return result

    def evaluate(self, model: Params) -> Evaluated | None:
        return self.trainer.evaluate(model)


class Lossy(MemoryFleet):
    """A fleet in which some answers, chosen by round and client, are late or broken; knows what was counted."""

    def __init__(self, trainers: Mapping[str, Watched], share: float) -> None:
        super().__init__(trainers)
        self.trainers, self.share, self.kept = trainers, share, dict[str, Any]()
        self.random, self.kinds = np.random.default_rng(5), list[str]()

    def receive(self, timeout_s: float) -> Outcome | None:
        outcome = super().receive(timeout_s)
        if outcome is None or outcome.update is None or self.random.random() >= self.share:
            return outcome
        if self.random.random() < 0.5:
            return replace(outcome, kind="late", update=None)
        extra = {**outcome.update.extra, "more": np.zeros(1)}
        return replace(outcome, update=replace(outcome.update, extra=extra))

    def settle(self, task: Task, counted: bool) -> None:
        super().settle(task, counted)
        if counted:
            self.kept[task.client] = self.trainers[task.client].seen[task.round]


def trained(
    local: Local, *, rounds: int, share: float = 0.0, fraction: float = 1.0, answers: int | None = 1
) -> tuple[RunState, Lossy]:
    """A run on `POINTS` in float64."""
    fleet = Lossy({name: Watched(numpy_line(at, dtype=np.float64)) for name, at in POINTS.items()}, share)
    strategy = Strategy(select=uniform(fraction=fraction), local=local, aggregate=weighted_mean(equally))
    first = first_state(strategy, Start(pair(0, 0, np.float64), {}), seed=3)
    return run(strategy, fleet, first, rounds=rounds, settings=CohortSettings(answers=answers)), fleet


def test_scaffold_and_feddyn_end_at_the_optimum_that_fedavg_misses() -> None:
    work: dict[str, Any] = {"steps": 5, "learning_rate": 0.05}
    assert numbers(trained(sgd_epochs(**work), rounds=200)[0].params) != pytest.approx(best(), abs=0.05)
    for local in (scaffold(**work), scaffold(**work, option=1), feddyn(0.5, **work)):
        assert numbers(trained(local, rounds=200)[0].params) == pytest.approx(best(), abs=1e-6)


@pytest.mark.parametrize("make", [scaffold, lambda **work: feddyn(0.5, **work)])
def test_what_the_server_keeps_is_the_mean_of_what_clients_keep_also_with_answers_that_do_not_count(
    make: Callable[..., Local],
) -> None:
    local = make(steps=5, learning_rate=0.05)
    state, fleet = trained(local, rounds=40, share=0.3, fraction=0.75, answers=2)
    skipped = sum(bool(record.skipped) for record in state.history)
    lost = sum(record.num_asked - record.num_ok for record in state.history)
    assert skipped >= 3
    assert lost >= 20
    key = "control" if "dtypes" in state.local else "h"
    for name in state.params:
        mean = sum(fleet.kept[client][key][name] for client in POINTS if client in fleet.kept) / len(POINTS)
        np.testing.assert_allclose(state.local["sum"][name] / state.local["total"], mean, rtol=0, atol=1e-12)
    if key == "control":
        assert numbers(trained(local, rounds=600, share=0.3)[0].params) == pytest.approx(best(), abs=1e-6)


def test_a_second_payload_that_is_not_the_declared_one_is_invalid_and_counts_for_nothing() -> None:
    state, fleet = trained(scaffold(), rounds=1, share=1.0)
    assert state.history[0].num_ok == 0
    assert not fleet.kept
    assert not state.local["sum"]["weight"].any()


def test_the_weight_in_a_task_is_decided_when_it_is_planned() -> None:
    strategy = Strategy(select=uniform(), local=scaffold(weight=by_examples), aggregate=weighted_mean())
    state = first_state(strategy, Start(pair(0, 0), {}), seed=0)
    cohort = plan(strategy, state, [CLIENT], CohortSettings(), start_of(strategy, state))
    assert cohort.tasks[0].local == ("scaffold", {"option": 2, "epochs": 1, "weight": 10.0})


def test_clients_that_do_more_work_do_not_pull_the_normalised_mean_towards_their_optimum() -> None:
    # The losses differ only in where they are smallest, at weight + bias = 0 and 1: together at 0.5.
    plain = sgd_epochs(learning_rate=0.001)
    steps = {"a": 1, "b": 9}
    local = plain._replace(
        task=lambda state, client, round: ("sgd_epochs", {"steps": steps[client.id], "learning_rate": 0.001})
    )
    fleet = MemoryFleet({"a": numpy_line((1, 0), dtype=np.float64), "b": numpy_line((1, 1), dtype=np.float64)})
    ends = []
    for aggregate in (weighted_mean(equally), normalised_mean(equally)):
        strategy = Strategy(select=uniform(), local=local, aggregate=aggregate)
        first = first_state(strategy, Start(pair(0, 0, np.float64), {}), seed=0)
        ends.append(sum(numbers(run(strategy, fleet, first, rounds=500, settings=CohortSettings()).params)))
    assert ends[0] == pytest.approx(0.9, abs=0.01)  # nine of ten steps go to the second
    assert ends[1] == pytest.approx(0.5, abs=0.005)
