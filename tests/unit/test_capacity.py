import os
import subprocess
import sys
import types

import psutil
import pytest

from fedtrain.client import capacity
from fedtrain.client.capacity import measure_capacity


@pytest.fixture
def no_limits(monkeypatch, tmp_path):
    """A machine without container limits; files written to the folder become limits."""
    monkeypatch.setattr(capacity, "_CGROUP", tmp_path)
    return tmp_path


def pretend_torch(*, num_devices, initialized, mps=False):
    cuda = types.SimpleNamespace(
        is_available=lambda: num_devices > 0,
        device_count=lambda: num_devices,
        is_initialized=lambda: initialized,
        get_device_properties=lambda index: types.SimpleNamespace(total_memory=1000 + index),
    )
    backends = types.SimpleNamespace(mps=types.SimpleNamespace(is_available=lambda: mps))
    return types.SimpleNamespace(cuda=cuda, backends=backends)


def test_without_limits_it_is_what_the_machine_has(no_limits, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    found = measure_capacity()
    assert found.memory_bytes == psutil.virtual_memory().total
    assert found.num_cores == len(psutil.Process().cpu_affinity() if hasattr(os, "sched_getaffinity") else [0])
    assert found.devices == ("cpu",)
    assert found.device_memory_bytes == 0


@pytest.mark.parametrize(
    ("content", "cores"),
    [("150000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", 8), ("900000 100000", 8), ("nonsense", 8)],
)
def test_a_containers_share_of_cpu_time_limits_the_cores(no_limits, monkeypatch, content, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    (no_limits / "cpu.max").write_text(content)
    assert measure_capacity().num_cores == cores


@pytest.mark.parametrize(("content", "memory"), [("1048576\n", 2**20), ("max\n", None), (str(2**62), None)])
def test_a_containers_memory_limit_counts(no_limits, content, memory):
    (no_limits / "memory.max").write_text(content)
    assert measure_capacity().memory_bytes == (memory or psutil.virtual_memory().total)


def test_accelerators_come_before_the_cpu_with_their_memory_once_they_are_in_use(no_limits, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", pretend_torch(num_devices=2, initialized=True))
    found = measure_capacity()
    assert found.devices == ("cuda:0", "cuda:1", "cpu")
    assert found.device_memory_bytes == 2001


def test_an_unused_accelerator_is_named_without_creating_a_context_on_it(no_limits, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", pretend_torch(num_devices=1, initialized=False, mps=True))
    found = measure_capacity()
    assert found.devices == ("cuda:0", "mps", "cpu")
    assert found.device_memory_bytes == 0


def test_torch_is_not_imported_for_it():
    script = (
        "import sys; from fedtrain.client.capacity import measure_capacity\n"
        "measure_capacity(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
