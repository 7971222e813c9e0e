"""Worker: one client's part of a task, from start to outcome, without any network."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import index

from fedtrain import params as arrays
from fedtrain.client.trainer import Trainer, Work
from fedtrain.errors import Cancelled, Declined
from fedtrain.precision import HALVES, rounded
from fedtrain.random import generator
from fedtrain.transforms import ON_CLIENT, Transform, chain
from fedtrain.types import Outcome, Params, Start, State, Task, Update


class Worker:
    """Does tasks with a trainer, and keeps what the local algorithm remembers on this client.

    That memory changes only when the server says that the update was counted: a client whose update came too late must
    not go on from a state that the server never saw.

    Args:
        trainer: Does the work.
        state: What the local algorithm remembers from before, where that was kept elsewhere.
    """

    def __init__(self, trainer: Trainer, state: State = ()) -> None:
        self._trainer = trainer
        self._state = state
        self._pending: dict[int, State] = {}

    @property
    def num_examples(self) -> int:
        """Examples in the local training data."""
        return self._trainer.num_examples

    @property
    def local_algorithms(self) -> tuple[str, ...]:
        """Names of the local algorithms that the trainer can do."""
        return tuple(self._trainer.local_algorithms)

    def perform(
        self,
        task: Task,
        start: Start,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[float], None] = lambda fraction: None,
        on_error: Callable[[Exception], object] = lambda error: None,
    ) -> Outcome:
        """Do a task. Never raises for what the trainer does, except `Cancelled`: an exception is an outcome.

        Args:
            task: What to do.
            start: What it starts from; left unchanged.
            cancelled: Asked between batches; once true, `Cancelled` is raised.
            progress: Told which part is done, in [0, 1].
            on_error: Given the trainer's exception, so that its traceback can be shown where it happened.

        Returns:
            An outcome of kind ok, declined or failed, with the reason; `seconds` is the time spent here.
        """
        began = time.monotonic()
        try:
            outcome = (
                self._train(task, start, cancelled, progress) if task.kind == "train" else self._measure(task, start)
            )
        except Cancelled:
            raise
        except Declined as error:
            outcome = Outcome(task, "declined", reason=str(error) or "declined without a reason")
        except Exception as error:
            on_error(error)
            outcome = Outcome(task, "failed", reason=f"{type(error).__name__}: {error}")
        return replace(outcome, seconds=time.monotonic() - began)

    def forget(self) -> None:
        """Drop what the local algorithm remembers: another run begins."""
        self._state, self._pending = (), {}

    def pending(self, number: int) -> State:
        """What the local algorithm will remember if the update of this task, the last one trained, is counted."""
        return self._pending[number]

    def settle(self, number: int, counted: bool) -> None:
        """Keep (counted) or drop what the local algorithm remembered of a task; unknown numbers are ignored."""
        state = self._pending.pop(number, None)
        if counted and state is not None:
            self._state = state

    def _train(
        self, task: Task, start: Start, cancelled: Callable[[], bool], progress: Callable[[float], None]
    ) -> Outcome:
        name = task.local[0]
        if name not in self._trainer.local_algorithms:
            can = ", ".join(self._trainer.local_algorithms) or "none"
            raise Declined(f"this client's trainer can't do the local algorithm {name!r}, only: {can}")
        if task.wire_dtype is not None and task.wire_dtype not in HALVES:
            raise Declined(f"this client can't send {task.wire_dtype!r}: update fedtrain on this client")
        transform = _transform(task)
        fitted = self._trainer.fit(start, Work(task.round, task.local, task.seed, self._state, cancelled, progress))
        metrics, num_examples, num_steps = _floats(fitted.metrics), index(fitted.num_examples), index(fitted.num_steps)
        delta: Params = arrays.subtract(fitted.model, {**start.params, **start.buffers})
        delta, _ = transform.apply(delta, transform.init(delta), generator(task.seed, "on_client"))
        delta = rounded(delta, task.wire_dtype, what="the update")
        self._pending = {task.number: fitted.client_state}
        update = Update(task, delta, num_examples, num_steps, metrics, fitted.extra)
        return Outcome(task, "ok", update, metrics, num_examples)

    def _measure(self, task: Task, start: Start) -> Outcome:
        evaluated = self._trainer.evaluate({**start.params, **start.buffers})
        if evaluated is None:
            raise Declined("this client has no held-out examples")
        return Outcome(task, "ok", metrics=_floats(evaluated.metrics), num_examples=index(evaluated.num_examples))


def _floats(metrics: Mapping[str, float]) -> dict[str, float]:
    """Plain numbers, whatever library's numbers a trainer uses."""
    return {name: float(value) for name, value in metrics.items()}


def _transform(task: Task) -> Transform:
    for name, _ in task.on_client:
        if name not in ON_CLIENT:
            raise Declined(f"this client can't do the transform {name!r}: update fedtrain on this client")
    return chain(*(ON_CLIENT[name](**numbers) for name, numbers in task.on_client))
