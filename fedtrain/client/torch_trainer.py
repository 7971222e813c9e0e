"""A trainer for PyTorch modules."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pkgutil import resolve_name
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedtrain.client.torch_arrays import layout, load_arrays, state_tensors, to_array, to_tensor
from fedtrain.client.torch_device import isolated, pick_device
from fedtrain.client.torch_optim import Correction, Sgd
from fedtrain.client.trainer import Evaluated, Fitted, Work
from fedtrain.data.batches import batches, num_batches, num_steps, positive, prescribed
from fedtrain.data.split import Examples, Split
from fedtrain.errors import Cancelled, ConfigError
from fedtrain.local import CLIENT_HALVES, client_half
from fedtrain.params import require_same_layout
from fedtrain.types import Params, Start

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> the mean loss over the batch, a tensor without dimensions."""

Metric = Callable[[Tensor, Tensor], "Tensor | float"]
"""(outputs, targets) -> the mean over the batch, or one value per example (summed without rounding)."""


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether the largest logit is that of the target class, for each example."""
    return outputs.argmax(dim=1) == targets


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error; outputs of shape (n, 1) go with targets of shape (n,)."""
    return functional.mse_loss(outputs, targets.view_as(outputs))


LOSSES: Mapping[str, Loss] = {"cross_entropy": functional.cross_entropy, "mse": mse}
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
"""Beside ``sgd``, which is `fedtrain.client.torch_optim.Sgd`."""


class TorchTrainer:
    """Minibatch training of a PyTorch module, a pure function of the model it starts from and the task.

    The module's state travels by name: parameters that require gradients as params; all else in its ``state_dict``
    (frozen parameters, running statistics, counters, masks) as buffers. Weights tied under two names travel once, under
    the first. The optimizer is new for each task, so momentum starts from zero. On a CPU with one thread, equal starts
    and tasks give equal bits. A call leaves torch's global state (random numbers, threads, default dtype) as it was.

    A last batch of one example is joined to the one before where the module has batch normalisation, which is undefined
    for a single example; no example is left out.

    Args:
        model: Makes a new module; called once here and once per `initial`. Draws its random numbers from torch.
        data: This client's own examples, or the server's held-out ones; kept on the device. Floating-point arrays take
            the dtype of the module's parameters, integer targets become int64.
        loss: ``cross_entropy``, ``mse``, or your own (outputs, targets) -> mean loss over the batch. Here and below,
            your own may also be given by its import path, such as ``my_package.focal_loss``.
        optimizer: ``sgd``, ``adam``, ``adamw``, or your own (parameters, lr=...) -> `torch.optim.Optimizer`.
        learning_rate: Step size, > 0, where the task leaves it open.
        momentum: Of ``sgd``, in [0, 1).
        weight_decay: Of the named optimizers, >= 0.
        batch_size: Examples per step, >= 1, where the task leaves it open.
        metrics: Measured beside ``loss`` in `evaluate`: (outputs, targets) -> mean over the batch, or one value per
            example. None means accuracy for ``cross_entropy``, nothing for other losses.
        device: Such as ``cpu``, ``cuda:0``; ``auto`` takes CUDA, else MPS, else the CPU.
        autocast: ``bfloat16`` computes the forward pass in it where torch finds that safe; parameters keep their dtype.
        clip_grad_norm: Largest norm of the loss's gradient over all parameters, > 0; None leaves it. The local
            algorithm's correction is added after clipping.
        eval_batch_size: Examples per forward pass in `evaluate`, >= 1.
        threads: CPU threads of torch during a call, >= 1; None leaves the process's setting.

    Raises:
        ConfigError: a setting is out of its range.
        ParamsError: the module's state can't travel.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        data: Split,
        *,
        loss: str | Loss = "cross_entropy",
        optimizer: str | Callable[..., torch.optim.Optimizer] = "sgd",
        learning_rate: float = 0.05,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        batch_size: int = 32,
        metrics: Mapping[str, str | Metric] | None = None,
        device: str = "auto",
        autocast: str | None = None,
        clip_grad_norm: float | None = None,
        eval_batch_size: int = 1024,
        threads: int | None = None,
    ) -> None:
        _check("learning_rate", learning_rate, learning_rate > 0, "> 0")
        _check("momentum", momentum, 0 <= momentum < 1, "in [0, 1)")
        _check("weight_decay", weight_decay, weight_decay >= 0, ">= 0")
        _check("batch_size", batch_size, batch_size >= 1, ">= 1")
        _check("eval_batch_size", eval_batch_size, eval_batch_size >= 1, ">= 1")
        _check("clip_grad_norm", clip_grad_norm, clip_grad_norm is None or clip_grad_norm > 0, "> 0 or null")
        _check("threads", threads, threads is None or threads >= 1, ">= 1 or null")
        _check("autocast", autocast, autocast in (None, "bfloat16"), "null or bfloat16")
        _check("momentum", momentum, not momentum or optimizer == "sgd", "0 unless optimizer is sgd")
        named = optimizer == "sgd" or optimizer in OPTIMIZERS
        _check("weight_decay", weight_decay, not weight_decay or named, "0 with an optimizer of your own")
        self._factory = model
        if metrics is None:
            metrics = {"accuracy": accuracy} if loss == "cross_entropy" else {}
        self._loss: Loss = _resolve("loss", loss, LOSSES)
        self._metrics: Mapping[str, Metric] = {
            name: _resolve(f"metrics.{name}", metric, {"accuracy": accuracy}) for name, metric in metrics.items()
        }
        self._optimizer = None if optimizer == "sgd" else _resolve("optimizer", optimizer, OPTIMIZERS)
        self._optimizer_options = {"weight_decay": weight_decay} if optimizer in OPTIMIZERS else {}
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._batch_size = batch_size
        self._eval_batch_size = eval_batch_size
        self._clip_grad_norm = clip_grad_norm
        self._autocast = autocast
        self._threads = threads
        self._device = pick_device(device)
        with self._isolated(seed=0):
            self._module = model().to(self._device)
        params, buffers = state_tensors(self._module)
        self._params_layout, self._buffers_layout = layout(params), layout(buffers)
        self._keep_single = not any(
            isinstance(part, nn.modules.batchnorm._BatchNorm) for part in self._module.modules()
        )
        state = {id(tensor) for tensor in (*params.values(), *buffers.values())}
        # Buffers outside the state don't travel; each task starts from those that the factory made.
        self._transient = {
            name: buffer.clone() for name, buffer in self._module.named_buffers() if id(buffer) not in state
        }
        dtype = next(iter(params.values())).dtype if params else torch.float32
        self._order = data.order
        self._train = _on_device(data.train, self._device, dtype)
        self._test = _on_device(data.test, self._device, dtype)

    @property
    def num_examples(self) -> int:
        """Examples in the local training data."""
        return len(self._train[0]) if self._train is not None else 0

    @property
    def local_algorithms(self) -> tuple[str, ...]:
        """All local algorithms that fedtrain has."""
        return tuple(CLIENT_HALVES)

    def initial(self, seed: int) -> Start:
        """The state of a new module; a function of the seed, for factories that draw from torch's generators."""
        with self._isolated(seed):
            params, buffers = state_tensors(self._factory())
        return Start(_arrays(params), _arrays(buffers))

    def fit(self, start: Start, work: Work) -> Fitted:
        """Train from `start` as `work` says; without training examples, give it back.

        The metric ``loss`` is the mean over the examples of the last epoch, each measured just before it was trained
        on. Values that are not finite are returned as they are.

        Raises:
            ParamsError: the arrays of `start` are not those of the module.
            Declined: the local algorithm is unknown, or a number of the task is impossible.
            Cancelled: the task was called off.
        """
        name, numbers = work.local
        half = client_half(name)
        require_same_layout(self._params_layout, start.params, what="the client's model (trainable part)")
        require_same_layout(self._buffers_layout, start.buffers, what="the client's model (buffers)")
        if self._train is None or not self.num_examples:
            same = {key: np.array(array) for key, array in {**start.params, **start.buffers}.items()}
            return Fitted(same, 0, client_state=work.client_state)

        rate = float(positive(numbers, "learning_rate", self._learning_rate))
        batch_size = max(1, int(positive(numbers, "batch_size", self._batch_size)))
        per_epoch = num_batches(self.num_examples, batch_size, keep_single=self._keep_single)
        total = num_steps(numbers, per_epoch)
        shuffled = batches(self.num_examples, batch_size, work.seed, keep_single=self._keep_single)
        order = shuffled if self._order is None else prescribed(self._order, (work.round - 1) * total)
        numbers = {**numbers, "learning_rate": rate, "batch_size": batch_size, "num_steps": total}

        with self._isolated(work.seed):
            params = self._load({**start.params, **start.buffers})
            correction = None
            if half is not CLIENT_HALVES["sgd_epochs"]:
                correction = Correction(
                    half, params, start, work, numbers, self._device, lambda: self._whole_gradient(params)
                )
            optimizer = self._new_optimizer(list(params.values()), rate)
            self._module.train()
            losses: list[Tensor] = []
            sizes: list[int] = []
            told = 0
            try:
                for step, indices in zip(range(total), order, strict=False):
                    if work.cancelled():
                        raise Cancelled(f"round {work.round}: called off after {step} of {total} steps")
                    loss = self._backward(params, indices)
                    if correction is not None:
                        correction.apply()
                    optimizer.step()
                    if step >= total - per_epoch:
                        losses.append(loss)
                        sizes.append(len(indices))
                    if (step + 1) * 100 // total > told:
                        told = (step + 1) * 100 // total
                        work.progress((step + 1) / total)
            finally:
                for param in params.values():
                    param.grad = None
            extra, client_state = correction.finish() if correction is not None else ({}, work.client_state)
            trained, buffers = state_tensors(self._module)
            return Fitted(
                model={**_arrays(trained), **_arrays(buffers)},
                num_examples=self.num_examples,
                num_steps=total,
                metrics={"loss": _weighted_mean(torch.stack(losses).tolist(), sizes)},
                extra=extra,
                client_state=client_state,
            )

    def evaluate(self, model: Params) -> Evaluated | None:
        """Mean loss and metrics on the held-out examples; None where there are none.

        Raises:
            ParamsError: the arrays are not those of the module.
        """
        if self._test is None or not len(self._test[0]):
            return None
        require_same_layout({**self._params_layout, **self._buffers_layout}, model, what="the local model")
        inputs, targets = self._test
        sums = dict.fromkeys(["loss", *self._metrics], 0.0)
        with self._isolated(seed=0), torch.no_grad():
            self._load(model)
            self._module.eval()
            for first in range(0, len(inputs), self._eval_batch_size):
                x, y = inputs[first : first + self._eval_batch_size], targets[first : first + self._eval_batch_size]
                with self._forward():
                    outputs = self._module(x)
                    sums["loss"] += float(self._loss(outputs, y)) * len(x)
                for name, metric in self._metrics.items():
                    sums[name] += _sum(metric(outputs, y), len(x))
        return Evaluated(len(inputs), {name: value / len(inputs) for name, value in sums.items()})

    def _backward(self, params: Mapping[str, Tensor], indices: Any, *, clip: bool = True) -> Tensor:
        assert self._train is not None
        inputs, targets = self._train
        batch = torch.from_numpy(indices).to(self._device)
        for param in params.values():
            param.grad = None
        with self._forward():
            loss = self._loss(self._module(inputs.index_select(0, batch)), targets.index_select(0, batch))
        loss.backward()  # type: ignore[no-untyped-call]
        if clip and self._clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(params.values(), self._clip_grad_norm)
        return loss.detach()

    def _whole_gradient(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradient of the loss over all training examples, without dropout, and with the statistics as they are."""
        assert self._train is not None
        self._module.eval()
        sums = {name: torch.zeros_like(param) for name, param in params.items()}
        for first in range(0, self.num_examples, self._eval_batch_size):
            indices = np.arange(first, min(first + self._eval_batch_size, self.num_examples))
            self._backward(params, indices, clip=False)
            for name, param in params.items():
                if param.grad is not None:
                    sums[name].add_(param.grad, alpha=len(indices) / self.num_examples)
        return sums

    def _forward(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16) if self._autocast else nullcontext()

    def _load(self, arrays: Params) -> dict[str, Tensor]:
        params, buffers = state_tensors(self._module)
        load_arrays(params, arrays)
        load_arrays(buffers, arrays)
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                if name in self._transient:
                    buffer.copy_(self._transient[name])
        return params

    def _new_optimizer(self, params: list[Tensor], rate: float) -> "torch.optim.Optimizer | Sgd":
        if self._optimizer is not None:
            return cast("torch.optim.Optimizer", self._optimizer(params, lr=rate, **self._optimizer_options))
        return Sgd(params, rate, self._momentum, self._weight_decay)

    def _isolated(self, seed: int) -> AbstractContextManager[None]:
        return isolated(self._device, seed, self._threads)


def _on_device(examples: Examples | None, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    if examples is None:
        return None
    inputs, targets = to_tensor(examples.inputs, device), to_tensor(examples.targets, device)
    return (
        inputs.to(dtype) if inputs.is_floating_point() else inputs,
        targets.to(dtype) if targets.is_floating_point() else targets.to(torch.int64),
    )


def _arrays(tensors: Mapping[str, Tensor]) -> Params:
    return {name: to_array(tensor) for name, tensor in tensors.items()}


def _sum(value: Tensor | float, size: int) -> float:
    if isinstance(value, Tensor) and value.ndim:
        return math.fsum(value.flatten().tolist()) if value.is_floating_point() else float(value.sum())
    return float(value) * size


def _weighted_mean(values: list[float], sizes: list[int]) -> float:
    return math.fsum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)


def _resolve(setting: str, value: Any, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    allowed = f"a callable, its import path, or one of {', '.join(known)}"
    if isinstance(value, str):
        try:
            value = known[value] if value in known else resolve_name(value)
        except (ImportError, AttributeError, ValueError) as error:
            _check(setting, value, False, f"{allowed} ({error})")
    _check(setting, value, callable(value), allowed)
    return cast("Callable[..., Any]", value)


def _check(name: str, found: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"trainer setting {name} must be {allowed}, found {found!r}")
