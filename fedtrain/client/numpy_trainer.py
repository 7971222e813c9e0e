"""A trainer for models written in NumPy: no torch on the client."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.random import Generator

from fedtrain.client.trainer import Evaluated, Fitted, Work
from fedtrain.data.batches import batches, num_batches, num_steps, positive, prescribed
from fedtrain.data.split import Examples, Split
from fedtrain.errors import Cancelled, ConfigError, ParamsError
from fedtrain.local import CLIENT_HALVES, client_half
from fedtrain.params import is_float, require_same_layout
from fedtrain.random import generator
from fedtrain.types import Array, Params, Start


class NumpyModel(Protocol):
    """What `NumpyTrainer` needs to know of a model. All its arrays are trainable and floating point."""

    def initial(self, random: Generator) -> Params:
        """New arrays by name, drawn from `random` alone."""

    def loss_and_gradient(self, params: Params, x: Array, y: Array) -> tuple[float, Params]:
        """The loss, averaged over the examples, and its gradient for every name in `params`."""

    def metrics(self, params: Params, x: Array, y: Array) -> Mapping[str, float]:
        """Averages over the examples, such as ``loss`` and ``accuracy``."""


class NumpyTrainer:
    """Minibatch SGD on a NumPy model: ``params -= learning_rate * gradient``.

    The order of batches is that of `TorchTrainer` for the same task.

    Args:
        model: The model, such as `fedtrain.models.softmax.softmax()`.
        data: This client's own examples, or the server's held-out ones.
        learning_rate: Step size, > 0, where the task leaves it open.
        batch_size: Examples per step, >= 1, where the task leaves it open.

    Raises:
        ConfigError: a setting is out of its range.
        ParamsError: the model has arrays that are not floating point.
    """

    def __init__(self, model: NumpyModel, data: Split, *, learning_rate: float = 0.1, batch_size: int = 32) -> None:
        if not learning_rate > 0:
            raise ConfigError(f"trainer setting learning_rate must be > 0, found {learning_rate}")
        if not batch_size >= 1:
            raise ConfigError(f"trainer setting batch_size must be >= 1, found {batch_size}")
        self._model = model
        self._data = data
        self._learning_rate = learning_rate
        self._batch_size = batch_size
        self._layout = _float_arrays(model.initial(generator(0, "model")))

    @property
    def num_examples(self) -> int:
        """Examples in the local training data."""
        return len(self._data.train) if self._data.train is not None else 0

    @property
    def local_algorithms(self) -> tuple[str, ...]:
        """All local algorithms that fedtrain has."""
        return tuple(CLIENT_HALVES)

    def initial(self, seed: int) -> Start:
        """New arrays from the model; a function of the seed."""
        return Start(_float_arrays(self._model.initial(generator(seed, "model"))), {})

    def fit(self, start: Start, work: Work) -> Fitted:
        """Train from `start` as `work` says; without training examples, give it back.

        The metric ``loss`` is the mean over the examples of the last epoch, each measured just before it was trained
        on.

        Raises:
            ParamsError: the arrays of `start` are not those of the model.
            Declined: the local algorithm is unknown, or a number of the task is impossible.
            Cancelled: the task was called off.
        """
        name, numbers = work.local
        half = client_half(name)
        require_same_layout(self._layout, {**start.params, **start.buffers}, what="the client's model")
        params = {name: np.array(array) for name, array in start.params.items()}
        train = self._data.train
        if train is None or not len(train):
            return Fitted(params, 0, client_state=work.client_state)

        rate = float(positive(numbers, "learning_rate", self._learning_rate))
        batch_size = max(1, int(positive(numbers, "batch_size", self._batch_size)))
        per_epoch = num_batches(len(train), batch_size)
        total = num_steps(numbers, per_epoch)
        numbers = {**numbers, "learning_rate": rate, "batch_size": batch_size, "num_steps": total}
        state = work.client_state
        if half.begin is not None:
            state = half.begin(lambda: self._gradient(params, train), state, numbers)
        given = self._data.order
        shuffled = batches(len(train), batch_size, work.seed)
        order = shuffled if given is None else prescribed(given, (work.round - 1) * total)
        losses: list[tuple[float, int]] = []
        for step, batch in zip(range(total), order, strict=False):
            if work.cancelled():
                raise Cancelled(f"round {work.round}: called off after {step} of {total} steps")
            loss, gradient = self._model.loss_and_gradient(params, train.inputs[batch], train.targets[batch])
            gradient = half.correct(gradient, params, start.params, start.payload, state, numbers)
            for key, array in params.items():
                array -= (rate * gradient[key]).astype(array.dtype, copy=False)
            if step >= total - per_epoch:
                losses.append((loss, len(batch)))
            work.progress((step + 1) / total)
        extra, client_state = half.finish(start.params, params, start.payload, state, numbers)
        return Fitted(
            model=params,
            num_examples=len(train),
            num_steps=total,
            metrics={"loss": sum(loss * size for loss, size in losses) / sum(size for _, size in losses)},
            extra={key: _like(array, params.get(key)) for key, array in extra.items()},
            client_state=client_state,
        )

    def evaluate(self, model: Params) -> Evaluated | None:
        """The model's own metrics on the held-out examples; None where there are none.

        Raises:
            ParamsError: the arrays are not those of the model.
        """
        test = self._data.test
        if test is None or not len(test):
            return None
        require_same_layout(self._layout, model, what="the model to evaluate")
        return Evaluated(len(test), dict(self._model.metrics(model, test.inputs, test.targets)))

    def _gradient(self, params: Params, train: Examples) -> Params:
        """The gradient of the loss over all examples, in the dtypes of the parameters."""
        _, gradient = self._model.loss_and_gradient(params, train.inputs, train.targets)
        return {name: _like(array, params[name]) for name, array in gradient.items()}


def _like(array: Any, param: Array | None) -> Array:
    """An array (a number, if it has no dimensions) in the dtype of the parameter of that name."""
    return np.asarray(array, None if param is None else param.dtype)


def _float_arrays(arrays: Params) -> dict[str, Array]:
    for name, array in arrays.items():
        if not is_float(array):
            raise ParamsError(f"a NumPy model's arrays must be floating point, found {name!r} of {array.dtype}")
    return dict(arrays)
