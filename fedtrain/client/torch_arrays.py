"""A torch module's state as named NumPy arrays, and back."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedtrain.errors import ParamsError
from fedtrain.params import BFLOAT16, DTYPES
from fedtrain.types import Array, State

_NUMPY_DTYPES: Mapping[torch.dtype, np.dtype[Any]] = {
    dtype: DTYPES[name]
    for name, dtype in {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }.items()
}


def state_tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A module's own tensors by name: (trainable floating-point parameters, all other entries of its state).

    A tensor that the module holds under several names (tied weights) is given once, under the first of them.

    Raises:
        ParamsError: an entry is not initialised, has no dtype that travels, or is not a tensor.
    """
    params: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise ParamsError(
                f"the model's state {name!r} is a {type(tensor).__name__}, only tensors travel: remove it"
            )
        if nn.parameter.is_lazy(tensor):
            raise ParamsError(f"the model's {name!r} has no shape yet: call the module once before returning it")
        if tensor.dtype not in _NUMPY_DTYPES or tensor.layout != torch.strided:
            raise ParamsError(
                f"the model's {name!r} is {tensor.dtype} ({tensor.layout}), expected a dense tensor of "
                f"{', '.join(DTYPES)}: convert it, or register it with persistent=False"
            )
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        trainable = isinstance(tensor, nn.Parameter) and tensor.requires_grad and tensor.is_floating_point()
        (params if trainable else buffers)[name] = tensor
    return params, buffers


def layout(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Arrays with the names, shapes and dtypes of the tensors, that take no memory: every element is the same zero."""
    return {
        name: np.broadcast_to(np.zeros((), _NUMPY_DTYPES[tensor.dtype]), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def to_array(tensor: Tensor) -> Array:
    """A fresh array with a tensor's shape, dtype and values; torch.bfloat16 becomes `ml_dtypes.bfloat16`."""
    copied = tensor.detach().to("cpu", copy=True).contiguous()
    if copied.dtype == torch.bfloat16:
        return copied.view(torch.uint16).numpy().view(BFLOAT16)
    array: Array = copied.numpy()
    return array


def to_tensor(array: Array, device: torch.device) -> Tensor:
    """A tensor on `device` with an array's shape, dtype and values. On the CPU it may share the array's memory."""
    if array.dtype == BFLOAT16:
        return to_tensor(array.view(np.uint16), device).view(torch.bfloat16)
    if not (array.flags.writeable and array.flags.c_contiguous and array.dtype.isnative):
        # torch warns of read-only memory (received arrays are) and knows no negative strides or foreign byte order.
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array).to(device)


def load_arrays(tensors: Mapping[str, Tensor], arrays: Mapping[str, Array]) -> None:
    """Copy arrays into the tensors of the same names, in place; names and shapes must have been checked."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(to_tensor(arrays[name], torch.device("cpu")))


def map_state(function: Callable[[Any], Any], state: State) -> State:
    """Apply a function to every leaf of nested tuples and mappings."""
    if isinstance(state, tuple):
        return tuple(map_state(function, item) for item in state)
    if isinstance(state, Mapping):
        return {key: map_state(function, value) for key, value in state.items()}
    return function(state)
