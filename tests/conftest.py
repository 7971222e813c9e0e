"""What every test run needs, set before NumPy, torch or Flower are imported."""

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

# The same examples in every run: a red test stays red until it is mended. More of them: HYPOTHESIS_PROFILE=search.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if not needing:
        return
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))
