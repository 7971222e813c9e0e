"""How a step is taken on torch tensors: SGD, and a local algorithm's correction of the gradient."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtrain.client.torch_arrays import map_state, to_array, to_tensor
from fedtrain.client.trainer import Work
from fedtrain.local import ClientHalf
from fedtrain.types import Params, Start, State


class Sgd:
    """SGD with momentum and weight decay, step for step that of `torch.optim.SGD`.

    torch's own takes a second to make the first time, because it imports the compiler: too long for a small client.
    """

    def __init__(self, params: list[Tensor], learning_rate: float, momentum: float, weight_decay: float) -> None:
        self._params = params
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._velocity = [torch.zeros_like(param) for param in params] if momentum else []

    @torch.no_grad()
    def step(self) -> None:
        """Move each parameter that has a gradient."""
        used = [index for index, param in enumerate(self._params) if param.grad is not None]
        params = [self._params[index] for index in used]
        moves = [param.grad for param in params if param.grad is not None]
        if not moves:
            return
        if self._weight_decay:
            moves = list(torch._foreach_add(moves, params, alpha=self._weight_decay))
        if self._momentum:
            velocity = [self._velocity[index] for index in used]
            torch._foreach_mul_(velocity, self._momentum)
            torch._foreach_add_(velocity, moves)
            moves = velocity
        torch._foreach_add_(params, moves, alpha=-self._learning_rate)


class Correction:
    """A local algorithm's client half at work on a module's gradients."""

    def __init__(
        self,
        half: ClientHalf,
        params: Mapping[str, Tensor],
        start: Start,
        work: Work,
        numbers: Mapping[str, float],
        device: torch.device,
        gradient_at_start: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        def tensor(leaf: Any) -> Any:
            return to_tensor(leaf, device) if isinstance(leaf, np.ndarray) else leaf

        self._half = half
        self._params = params
        self._values = {name: param.detach() for name, param in params.items()}
        self._start = {name: value.clone() for name, value in self._values.items()}
        self._payload = {name: to_tensor(array, device) for name, array in start.payload.items()}
        self._client_state = map_state(tensor, work.client_state)
        if half.begin is not None:
            self._client_state = half.begin(gradient_at_start, self._client_state, numbers)
        self._numbers = numbers

    @torch.no_grad()
    def apply(self) -> None:
        """Replace each parameter's gradient by the corrected one; a missing gradient counts as zero."""
        gradient = {
            name: torch.zeros_like(param) if param.grad is None else param.grad for name, param in self._params.items()
        }
        corrected = self._half.correct(
            gradient, self._values, self._start, self._payload, self._client_state, self._numbers
        )
        for name, param in self._params.items():
            param.grad = corrected[name]

    @torch.no_grad()
    def finish(self) -> tuple[Params, State]:
        """After the last step: (second payload, new client state), as arrays."""

        def array(leaf: Any) -> Any:
            return to_array(leaf) if isinstance(leaf, Tensor) else leaf

        extra, state = self._half.finish(self._start, self._values, self._payload, self._client_state, self._numbers)
        return {name: to_array(value) for name, value in extra.items()}, map_state(array, state)
