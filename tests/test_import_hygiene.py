"""Names and imports: what must load without torch, and files that must not shadow a library."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
GENERATED = {"build", "dist", "__pycache__"}
TOP = sorted(
    d.name
    for d in ROOT.iterdir()
    if d.is_dir() and d.name[0] != "." and d.name not in GENERATED and d.suffix != ".egg-info"
)
OPTIONAL = {"cutlass", "flash_attn", "matplotlib", "nvshmem", "ray", "safetensors", "triton"}
"""What the extras install: files must not shadow it on machines that have it either."""


@pytest.mark.parametrize("module", ["errors", "mask", "shard", "plan"])
def test_planning_needs_neither_torch_nor_numpy(module: str) -> None:
    """None in sys.modules makes an import fail: a stand-in for a machine without them."""
    code = f"import sys; sys.modules.update(torch=None, numpy=None); import ringfa4.{module}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _shadowing(directory: str, names: set[str]) -> list[str]:
    """Modules and packages directly in ``directory`` that would hide one of ``names``."""
    place = ROOT / directory
    found = [p for p in place.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    return sorted(str(p.relative_to(ROOT)) for p in found if p.stem in names)


@pytest.mark.parametrize("directory", [d for d in TOP if d != "ringfa4"])
def test_no_file_is_named_like_the_standard_library(directory: str) -> None:
    """A directory becomes sys.path[0] as soon as somebody runs a file in it.

    ``launch/inspect.py`` would break ``import torch``. ringfa4/ is left out: it is only imported.
    """
    assert _shadowing(directory, set(sys.stdlib_module_names)) == []


@pytest.mark.parametrize("directory", [d for d in TOP if d in ("launch", "examples", "tests")])
def test_no_script_is_named_like_a_dependency(directory: str) -> None:
    """Where scripts live, and what pytest puts on the path. (comm/ holds the adapter `nvshmem`.)"""
    installed = {
        name for name, owners in packages_distributions().items() if set(owners) != {"ringfa4"}
    }
    assert "torch" in installed
    assert _shadowing(directory, installed | OPTIONAL) == []


def test_packages_are_exactly_the_directories_with_an_init() -> None:
    places = {ROOT / directory: package for package, directory in SETUPTOOLS["package-dir"].items()}
    found = {}
    for place, package in places.items():
        for file in place.rglob("*.py"):
            parts = file.parent.relative_to(place).parts
            found.setdefault(".".join((package, *parts)), set()).add(file.name)
    assert sorted(SETUPTOOLS["packages"]) == sorted(found)
    assert [package for package, files in found.items() if "__init__.py" not in files] == []
