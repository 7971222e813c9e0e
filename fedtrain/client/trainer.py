"""Trainer: what fedtrain needs from a client's model and data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from fedtrain.types import Params, Spec, Start, State


@dataclass(frozen=True)
class Work:
    """What a trainer is asked to do with the model that it starts from."""

    round: int
    local: Spec
    """Local algorithm by name, and its numbers: ``epochs``, ``learning_rate``, ``batch_size`` ..."""
    seed: int
    """Decides the order of batches (and dropout): equal seeds give equal results."""
    client_state: State = ()
    """What the local algorithm kept on this client after its last counted update."""
    cancelled: Callable[[], bool] = lambda: False
    """Asked between batches; once true, the trainer raises `Cancelled`."""
    progress: Callable[[float], None] = lambda fraction: None
    """Told now and then which part of the work is done, in [0, 1]."""


@dataclass(frozen=True)
class Fitted:
    """What training gave."""

    model: Params
    """All arrays of the trained model (not a delta), with the names, shapes and dtypes that it started from."""
    num_examples: int
    """Examples that were trained on, >= 0: the update's weight in a mean by examples."""
    num_steps: int = 0
    """Optimizer steps."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Params = field(default_factory=dict)
    """Second payload of the local algorithm."""
    client_state: State = ()


@dataclass(frozen=True)
class Evaluated:
    """Metrics of a model on local data."""

    num_examples: int
    metrics: Mapping[str, float]


@runtime_checkable
class Trainer(Protocol):
    """A model and its local data. Implement it with any library; torch is not needed.

    Methods may raise: `Declined` with a reason when a task can't or shouldn't be done, anything else is recorded by
    the server as a failed outcome with the exception's text. They are called from one thread at a time.
    """

    @property
    def num_examples(self) -> int:
        """Examples in the local training data, >= 0."""

    @property
    def local_algorithms(self) -> tuple[str, ...]:
        """Names of the local algorithms that `fit` can do."""

    def initial(self, seed: int) -> Start:
        """A new model: trainable floating-point arrays as params, all else as buffers; a function of the seed."""

    def fit(self, start: Start, work: Work) -> Fitted:
        """Train from `start` as `work` says. Leaves `start` unchanged and nothing behind in global state."""

    def evaluate(self, model: Params) -> Evaluated | None:
        """Measure a model, given by all its arrays, on the held-out examples; None where there are none."""
