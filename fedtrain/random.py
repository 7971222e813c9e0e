"""Random generators that are functions of (seed, purpose, numbers), so that a rerun draws the same.

No global generator is used or changed anywhere. A task's seed decides its batch order in every engine.
"""

import hashlib

import numpy as np


def _words(*key: int | str) -> list[int]:
    text = "\0".join(f"{type(part).__name__}:{part}" for part in key)
    raw = hashlib.sha256(text.encode()).digest()
    return [int.from_bytes(raw[i : i + 4], "little") for i in range(0, 32, 4)]


def generator(*key: int | str) -> np.random.Generator:
    """A NumPy generator for a key such as ``(seed, "select", round)``; equal keys give equal streams."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(_words(*key))))


def derived_seed(*key: int | str) -> int:
    """A seed in [0, 2**63) that is a function of the key, such as ``(seed, "task", round, client)``."""
    low, high = _words(*key)[:2]
    return low | (high >> 1) << 32
