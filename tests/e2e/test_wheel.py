"""The wheel that users install: what is in it, and that it works away from the checkout."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def called(command: Sequence[str | Path], *, cwd: Path, **variables: str) -> str:
    """Run a command with no path to the checkout, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def built(target: str, source: Path, folder: Path) -> Path:
    called([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder], cwd=source)
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content, as pip would put it into site-packages."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def files_below(folder: str, pattern: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(pattern) if "__pycache__" not in path.parts}


def test_the_wheel_has_one_top_level_name_and_all_files_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    (metadata,) = tops - {"fedtrain"}
    assert metadata.startswith("fedtrain-")
    assert metadata.endswith(".dist-info")
    assert f"{metadata}/licenses/LICENSE" in names
    package = files_below("fedtrain", "*.py") | {"fedtrain/py.typed"}
    moved = files_below("strategies", "*.py") | files_below("conf", "*.yaml") | files_below("conf", "*.py")
    expected = package | {f"fedtrain/{name}" for name in moved}
    assert "fedtrain/strategies/fedavg.py" in expected
    assert {name for name in names if name.startswith("fedtrain/")} == expected


def test_the_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    archive = built("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(archive) as sources:
        sources.extractall(tmp_path, filter="data")
    again = built("wheel", tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path / "wheel")
    assert again.name == wheel.name
    with zipfile.ZipFile(again) as one, zipfile.ZipFile(wheel) as other:
        contents = [{name: file.read(name) for name in file.namelist()} for file in (one, other)]
    assert contents[0] == contents[1]


def test_the_installed_package_has_strategies_and_configuration_inside_it(installed: Path, tmp_path: Path) -> None:
    program = """
import importlib.resources, fedtrain, fedtrain.strategies.fedavg as fedavg
print(fedtrain.__file__, fedavg.__file__, fedavg.build().aggregate.min_updates, len(fedtrain.__path__))
print(importlib.resources.files("fedtrain.conf").joinpath("config.yaml").is_file())
"""
    printed = called([sys.executable, "-c", program], cwd=tmp_path, PYTHONPATH=str(installed)).split()
    package = installed / "fedtrain"
    assert printed == [str(package / "__init__.py"), str(package / "strategies" / "fedavg.py"), "1", "1", "True"]


def test_strategies_and_the_core_need_neither_torch_nor_flower(installed: Path, tmp_path: Path) -> None:
    program = """
import sys
import fedtrain.strategies.fedavg, fedtrain.rounds, fedtrain.client.trainer
print([name for name in ("torch", "flwr", "hydra") if name in sys.modules])
"""
    assert called([sys.executable, "-c", program], cwd=tmp_path, PYTHONPATH=str(installed)).strip() == "[]"


@pytest.mark.slow
def test_the_wheel_without_extras_works_in_an_empty_environment_without_torch(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    scripts = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")
    pip = [scripts / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    called([*pip, "--constraint", ROOT / "constraints.txt", wheel], cwd=tmp_path)
    program = "import importlib.util, fedtrain; print(importlib.util.find_spec('torch'), fedtrain.Client.__name__)"
    assert called([scripts / "python", "-c", program], cwd=tmp_path).split() == ["None", "Client"]
    for command in ("fedtrain-server", "fedtrain-client", "fedtrain-sim"):
        assert "experiment" in called([scripts / command, "--help"], cwd=tmp_path)
    called([scripts / "fedtrain-sim", "experiment=quickstart_numpy", "rounds=2"], cwd=tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"venv", "runs"}
