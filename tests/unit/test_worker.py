from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakes import Adder

from fedtrain.client.trainer import Evaluated, Fitted, Trainer, Work
from fedtrain.client.worker import Worker
from fedtrain.errors import Cancelled, Declined
from fedtrain.testing import task_of
from fedtrain.transforms import ON_CLIENT, Transform
from fedtrain.types import Params, Start, State

START = Start(
    {"w": np.array([1.0, 2.0], np.float32)},
    {"mean": np.array([0.5], np.float64), "steps": np.array(7), "seen": np.array([True, False])},
)


def raising(error: BaseException) -> Callable[[Start, Work], None]:
    def fit(start: Start, work: Work) -> None:
        raise error

    return fit


class Remembering(Adder):
    """A trainer whose local algorithm counts, on the client, how often it was counted."""

    def fit(self, start: Start, work: Work) -> Fitted:
        fitted = super().fit(start, work)
        return Fitted(fitted.model, 1, client_state=(work.client_state or 0) + 1)


def states(trainer: Adder) -> list[State]:
    return [work.client_state for work in trainer.works]


def test_a_fake_trainer_is_a_trainer() -> None:
    assert isinstance(Adder(), Trainer)


def test_an_update_holds_what_training_changed() -> None:
    trainer = Adder(0.25, num_examples=12, metrics={"loss": 0.5})
    outcome = Worker(trainer).perform(task_of(3, "a", seed=9, round=4), START)
    assert (outcome.kind, outcome.reason, outcome.num_examples, outcome.metrics) == ("ok", "", 12, {"loss": 0.5})
    assert outcome.seconds >= 0
    update = outcome.update
    assert update is not None
    assert (update.task, update.num_examples, update.num_steps) == (outcome.task, 12, 1)
    assert update.metrics == {"loss": 0.5}
    (work,) = trainer.works
    assert (work.round, work.local, work.seed) == (4, ("sgd_epochs", {"epochs": 1}), 9)


def test_floats_travel_as_deltas_and_integers_and_bools_as_values() -> None:
    update = Worker(Adder(0.25)).perform(task_of(), START).update
    assert update is not None
    found = {name: (array.dtype.name, array.tolist()) for name, array in update.delta.items()}
    assert found == {
        "w": ("float32", [0.25, 0.25]),
        "mean": ("float64", [0.25]),
        "steps": ("int64", 8),
        "seen": ("bool", [True, True]),  # the fake sets every bool
    }


def test_training_that_raises_is_a_failed_outcome_with_the_type_and_the_text() -> None:
    errors: list[Exception] = []
    error = ValueError("no column 'age'")
    outcome = Worker(Adder(fit=raising(error))).perform(task_of(), START, on_error=errors.append)
    assert (outcome.kind, outcome.reason, outcome.update) == ("failed", "ValueError: no column 'age'", None)
    assert errors == [error]


def test_a_worker_lives_on_after_a_failure() -> None:
    trainer = Adder(fit=raising(MemoryError("1 TiB")))
    worker = Worker(trainer)
    assert worker.perform(task_of(0), START).kind == "failed"
    trainer._fit = lambda start, work: None
    assert worker.perform(task_of(0), START).kind == "ok"


@pytest.mark.parametrize(
    ("error", "reason"), [(Declined("on battery"), "on battery"), (Declined(), "declined without")]
)
def test_a_trainer_may_decline(error: Declined, reason: str) -> None:
    errors: list[Exception] = []
    outcome = Worker(Adder(fit=raising(error))).perform(task_of(), START, on_error=errors.append)
    assert outcome.kind == "declined"
    assert outcome.reason.startswith(reason)
    assert errors == []


def test_an_unknown_local_algorithm_is_declined_before_any_training() -> None:
    trainer = Adder()
    outcome = Worker(trainer).perform(task_of(local=("scaffold", {})), START)
    assert outcome.kind == "declined"
    assert outcome.reason == "this client's trainer can't do the local algorithm 'scaffold', only: sgd_epochs"
    assert trainer.works == []


def test_an_unknown_transform_is_declined_before_any_training() -> None:
    trainer = Adder()
    outcome = Worker(trainer).perform(task_of(on_client=(("top_k", {"fraction": 0.1}),)), START)
    assert outcome.kind == "declined"
    assert outcome.reason.startswith("this client can't do the transform 'top_k'")
    assert trainer.works == []


def test_transforms_are_applied_in_order_with_their_numbers_and_the_tasks_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(factor: float) -> Transform:
        return Transform(lambda params: (), lambda delta, state, random: ({"w": delta["w"] * factor}, state))

    def noise() -> Transform:
        return Transform(lambda params: (), lambda delta, state, random: ({"w": delta["w"] + random.normal()}, state))

    monkeypatch.setitem(ON_CLIENT, "times", times)
    monkeypatch.setitem(ON_CLIENT, "noise", noise)

    def delta(seed: int, *specs: Any) -> Params:
        update = Worker(Adder(1.0)).perform(task_of(seed=seed, on_client=specs), START).update
        assert update is not None
        return update.delta

    assert delta(0, ("times", {"factor": 2.0}), ("times", {"factor": 5.0}))["w"].tolist() == [10, 10]
    one, same, other = (delta(seed, ("noise", {}), ("times", {"factor": 2.0}))["w"][0] for seed in (1, 1, 2))
    assert one == same != other


def test_cancelling_passes_through() -> None:
    def fit(start: Start, work: Work) -> None:
        if work.cancelled():
            raise Cancelled

    assert Worker(Adder(fit=fit)).perform(task_of(), START, cancelled=lambda: False).kind == "ok"
    with pytest.raises(Cancelled):
        Worker(Adder(fit=fit)).perform(task_of(), START, cancelled=lambda: True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_the_end_of_the_process_is_not_taken_for_a_failure(error: type[BaseException]) -> None:
    with pytest.raises(error):
        Worker(Adder(fit=raising(error()))).perform(task_of(), START)


def test_progress_is_passed_on() -> None:
    told: list[float] = []
    Worker(Adder(fit=lambda start, work: work.progress(0.5))).perform(task_of(), START, progress=told.append)
    assert told == [0.5]


def test_what_a_local_algorithm_remembers_is_kept_only_when_the_update_was_counted() -> None:
    trainer = Remembering()
    worker = Worker(trainer)
    for number, counted in enumerate([False, True, False, True, True]):
        worker.perform(task_of(number), START)
        worker.settle(number, counted)
    assert states(trainer) == [(), (), 1, 1, 2]


def test_nothing_is_kept_before_the_server_has_said_so() -> None:
    trainer = Remembering()
    worker = Worker(trainer)
    worker.perform(task_of(0), START)
    worker.perform(task_of(0), START)  # asked again: the same start, the same result
    assert states(trainer) == [(), ()]
    worker.settle(0, True)
    worker.settle(0, True)  # told twice
    worker.settle(77, True)  # told of something unknown
    worker.perform(task_of(1), START)
    assert states(trainer) == [(), (), 1]


def test_another_run_begins_without_what_the_last_one_left() -> None:
    trainer = Remembering()
    worker = Worker(trainer)
    worker.perform(task_of(0), START)
    worker.settle(0, True)
    worker.perform(task_of(1), START)
    worker.forget()
    worker.settle(1, True)  # of the last run
    worker.perform(task_of(0), START)
    assert states(trainer) == [(), 1, ()]


def test_a_task_that_failed_leaves_nothing_to_keep() -> None:
    trainer = Remembering()
    worker = Worker(trainer)
    trainer._fit = raising(ValueError())
    worker.perform(task_of(0), START)
    worker.settle(0, True)
    trainer._fit = lambda start, work: None
    worker.perform(task_of(1), START)
    assert states(trainer)[-1] == ()


def test_a_model_with_another_layout_is_a_failed_outcome_that_names_the_array() -> None:
    class Wrong(Adder):
        def fit(self, start: Start, work: Work) -> Fitted:
            return Fitted({"w": np.zeros(3, np.float32), **start.buffers}, 1)

    outcome = Worker(Wrong()).perform(task_of(), START)
    assert outcome.kind == "failed"
    assert "'w' has shape (3,), the server's model has (2,)" in outcome.reason


@pytest.mark.parametrize(
    ("fitted", "reason"),
    [
        ({"num_examples": 2.5}, "TypeError: "),
        ({"num_examples": 1, "num_steps": "many"}, "TypeError: "),
        ({"num_examples": 1, "metrics": {"loss": "low"}}, "ValueError: "),
        ({"num_examples": 1, "metrics": {"loss": None}}, "TypeError: "),
    ],
)
def test_what_should_be_a_number_and_is_none_is_a_failed_outcome(fitted: dict[str, Any], reason: str) -> None:
    class Wrong(Adder):
        def fit(self, start: Start, work: Work) -> Fitted:
            return Fitted({**start.params, **start.buffers}, **fitted)

    outcome = Worker(Wrong()).perform(task_of(), START)
    assert outcome.kind == "failed"
    assert outcome.reason.startswith(reason)


def test_numbers_of_numpy_become_plain_ones() -> None:
    trainer = Adder(num_examples=np.int64(3), metrics={"loss": np.float32(0.5)})  # type: ignore[arg-type]
    for task in (task_of(), task_of(kind="evaluate")):
        outcome = Worker(trainer).perform(task, START)
        assert (type(outcome.num_examples), outcome.num_examples) == (int, 3)
        assert (type(outcome.metrics["loss"]), outcome.metrics) == (float, {"loss": 0.5})
    update = Worker(trainer).perform(task_of(), START).update
    assert update is not None
    assert (type(update.num_examples), type(update.num_steps), type(update.metrics["loss"])) == (int, int, float)


def test_measuring_gives_metrics_of_the_whole_model_and_no_update() -> None:
    trainer = Adder(num_examples=5, metrics={"accuracy": 0.75})
    outcome = Worker(trainer).perform(task_of(kind="evaluate", local=("evaluate", {})), START)
    assert (outcome.kind, outcome.update, outcome.metrics, outcome.num_examples) == ("ok", None, {"accuracy": 0.75}, 5)
    assert trainer.works == []
    assert [sorted(model) for model in trainer.evaluated] == [["mean", "seen", "steps", "w"]]


def test_a_client_without_held_out_examples_declines_to_measure() -> None:
    outcome = Worker(Adder()).perform(task_of(kind="evaluate", local=("evaluate", {})), START)
    assert (outcome.kind, outcome.reason) == ("declined", "this client has no held-out examples")


def test_measuring_that_raises_is_a_failed_outcome() -> None:
    class Broken(Adder):
        def evaluate(self, model: Params) -> Evaluated | None:
            raise OSError("disk")

    outcome = Worker(Broken()).perform(task_of(kind="evaluate"), START)
    assert (outcome.kind, outcome.reason) == ("failed", "OSError: disk")


def test_a_worker_shows_what_its_trainer_has_and_can() -> None:
    worker = Worker(Adder(num_examples=8))
    assert (worker.num_examples, worker.local_algorithms) == (8, ("sgd_epochs",))
