"""What this machine can run, as a client reports it to the server."""

import math
import os
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from fedtrain.types import Capacity

_CGROUP = Path("/sys/fs/cgroup")


def measure_capacity() -> Capacity:
    """Cores and memory that this process may use, and the accelerators that torch sees.

    Limits of a Linux container (cgroup v2) and the process's CPU affinity count. Torch is asked only if the program has
    imported it already; the memory of CUDA devices is known only once the program has used one, because asking would
    create a context on it. Takes a few milliseconds.
    """
    devices, device_memory_bytes = _accelerators()
    return Capacity(
        num_cores=_num_cores(),
        memory_bytes=_memory_bytes(),
        devices=(*devices, "cpu"),
        device_memory_bytes=device_memory_bytes,
    )


def _num_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read(_CGROUP / "cpu.max").split()  # "max 100000", or microseconds of CPU time per period
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
        cores = min(cores, math.ceil(int(quota[0]) / int(quota[1])))
    return max(1, cores)


def _memory_bytes() -> int:
    memory = int(psutil.virtual_memory().total)
    limit = _read(_CGROUP / "memory.max").strip()
    return min(memory, int(limit)) if limit.isdigit() else memory


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _accelerators() -> tuple[list[str], int]:
    torch = sys.modules.get("torch")
    if torch is None:
        return [], 0
    devices: list[str] = []
    memory_bytes = 0
    if torch.cuda.is_available():
        indices = range(torch.cuda.device_count())
        devices += [f"cuda:{index}" for index in indices]
        if torch.cuda.is_initialized():
            memory_bytes = sum(int(torch.cuda.get_device_properties(index).total_memory) for index in indices)
    if torch.backends.mps.is_available():
        devices.append("mps")
    return devices, memory_bytes
