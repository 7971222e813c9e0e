"""Half precision on the wire: what clients receive and send is rounded, what the server adds up is not.

The rounding is part of the run's numbers, not of its network, so that all fleets give the same model. Clients train
from the model with its float32 arrays rounded to the wire's dtype, and round the float32 arrays of their delta alike;
the server adds the deltas, in float32, to its unrounded model. Values that were rounded are packed in half the bytes
without a further loss. All other dtypes, and the second payloads of a local algorithm (whose errors would add up over
the rounds), travel as they are.

    bfloat16    range of float32, 8 significant bits: each value within 0.4 %
    float16     up to 65504, 11 significant bits: within 0.05 % from 6.1e-5 on, below that within 3e-8
"""

from collections.abc import Mapping

import numpy as np

from fedtrain.errors import ParamsError
from fedtrain.params import BFLOAT16, all_finite
from fedtrain.types import Array, Params, Start, WireDtype

HALVES: Mapping[WireDtype, np.dtype] = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}
"""The dtypes that arrays can travel in, by the name in ``wire.dtype``."""


def rounded(arrays: Params, dtype: WireDtype | None, *, what: str) -> Params:
    """Float32 arrays with each value rounded to the nearest one of `dtype` (ties to even), still as float32.

    Args:
        arrays: By name; those of other dtypes are given back as they are.
        dtype: Of the wire; None rounds nothing.
        what: Names the arrays in errors.

    Raises:
        ParamsError: a finite value is beyond the range of `dtype`. Infinities and NaN stay what they are.

    >>> rounded({"w": np.array([0.1, 1.0], np.float32)}, "bfloat16", what="the model")
    {'w': array([0.10009766, 1.        ], dtype=float32)}
    """
    if dtype is None:
        return arrays
    return {name: _rounded(name, array, dtype, what) for name, array in arrays.items()}


def rounded_start(start: Start, dtype: WireDtype | None) -> Start:
    """What clients begin at: the model rounded, the local algorithm's payload as it is.

    Raises:
        ParamsError: a value of the model is beyond the range of `dtype`.
    """
    return Start(
        rounded(start.params, dtype, what="the model"), rounded(start.buffers, dtype, what="the model"), start.payload
    )


def narrowed(array: Array, dtype: WireDtype) -> Array:
    """A float32 array that was `rounded`, in half the bytes and without loss; one of another dtype as it is."""
    return array.astype(HALVES[dtype]) if array.dtype == np.float32 else array


def widened(array: Array, dtype: WireDtype) -> Array:
    """The inverse of `narrowed`, read-only; an array that is not of `dtype` as it is."""
    if array.dtype != HALVES[dtype]:
        return array
    array = array.astype(np.float32)
    array.flags.writeable = False
    return array


def _rounded(name: str, array: Array, dtype: WireDtype, what: str) -> Array:
    if array.dtype != np.float32:
        return array
    with np.errstate(over="ignore", invalid="ignore"):  # looked at below
        result = array.astype(HALVES[dtype]).astype(np.float32)
    if not all_finite(result):
        beyond = np.isfinite(array) & ~np.isfinite(result)
        if beyond.any():
            raise ParamsError(
                f"{what}: {name!r} holds {array[beyond][0]:g}, beyond the range of {dtype}, in which it is to travel: "
                f"use wire.dtype={'bfloat16 or ' if dtype == 'float16' else ''}null on the server"
            )
    return result
