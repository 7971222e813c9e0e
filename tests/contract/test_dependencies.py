"""What is imported is declared, and the constraints hold a version of all that is declared."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(*folders: str) -> set[str]:
    """Top-level names of other projects that are imported anywhere below these folders."""
    names: set[str] = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"fedtrain"}


def test_every_package_that_is_imported_is_a_declared_requirement() -> None:
    declared = {normal(Requirement(text).name) for text in PROJECT["dependencies"]}
    declared |= {normal(Requirement(text).name) for text in PROJECT["optional-dependencies"]["torch"]}
    distributions = packages_distributions()
    for name in sorted(imported("fedtrain", "strategies", "conf")):
        found = {normal(distribution) for distribution in distributions.get(name, [])}
        assert found & declared, f"{name!r} is imported, and none of {found or 'no distribution'} is a requirement"


def test_the_constraints_pin_every_requirement_within_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups() for line in lines if not line.startswith("#"))  # type: ignore[union-attr]
    pinned = {normal(name): Version(version) for name, version in pins.items()}
    texts = [*PROJECT["dependencies"], *(text for extra in PROJECT["optional-dependencies"].values() for text in extra)]
    for requirement in (Requirement(text) for text in texts):
        if normal(requirement.name) != "fedtrain":
            assert requirement.specifier.contains(pinned[normal(requirement.name)]), requirement
