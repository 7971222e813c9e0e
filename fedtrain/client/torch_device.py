"""Where torch computes, and how a call leaves nothing behind in its global state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedtrain.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is CUDA where there is one, else MPS, else the CPU.

    Raises:
        ConfigError: torch knows no such device, or this machine has none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be auto, cpu, mps, cuda or cuda:N, found {name!r}") from None
    missing = (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()) or (
        device.type == "mps" and not torch.backends.mps.is_available()
    )
    if missing:
        raise ConfigError(f"device {name!r} is not on this machine: use auto or cpu")
    return device


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from `seed` on the CPU and on the device; their generators as before afterwards."""
    on_cuda, on_mps = device.type == "cuda", device.type == "mps"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        mps_state = torch.mps.get_rng_state() if on_mps else None
        # torch.manual_seed would seed every device of the process, and those are not restored.
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        if on_mps:
            torch.mps.manual_seed(seed)
        try:
            yield
        finally:
            if mps_state is not None:
                torch.mps.set_rng_state(mps_state)


@contextmanager
def isolated(device: torch.device, seed: int, threads: int | None) -> Iterator[None]:
    """Gradients on, random numbers from `seed`, `threads` CPU threads (None: as they are); all as before afterwards."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        with torch.inference_mode(False), torch.enable_grad(), _seeded(seed, device):
            yield
    finally:
        if threads is not None:
            torch.set_num_threads(before)
