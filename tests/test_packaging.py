"""What is installed: metadata, pins, and a wheel built through an sdist, as pip would."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IGNORED = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")


def _name(requirement: str) -> str:
    """The distribution's normalised name."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found.group()).lower()


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {_name(name): version for name, version in pairs}


def test_extras_are_the_documented_ones() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"dev", "cuda", "nvshmem", "fa4", "ray", "plot"} <= set(extras)


def test_everything_development_installs_is_pinned() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = list(PROJECT["project"]["dependencies"])
    for extra in ("dev", "plot", "ray", "cuda"):
        wanted += extras[extra]
    assert [r for r in wanted if _name(r) not in _pins()] == []


def test_the_library_itself_pins_nothing() -> None:
    exact = [r for r in PROJECT["project"]["dependencies"] if "==" in r or "<" in r]
    assert exact == []


def test_the_licence_is_the_whole_text() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def _build(source: Path, out: Path, what: str) -> Path:
    """Run the build backend on ``source`` as pip does, without its isolated environment."""
    code = f"from setuptools import build_meta; print(build_meta.build_{what}({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the unpacked sdist of a clean copy of this checkout."""
    tmp = tmp_path_factory.mktemp("wheel")
    copy = shutil.copytree(ROOT, tmp / "checkout", ignore=IGNORED)
    with tarfile.open(_build(copy, tmp, "sdist")) as archive:
        archive.extractall(tmp / "sdist", filter="data")
    (unpacked,) = (tmp / "sdist").iterdir()
    return _build(unpacked, tmp, "wheel")


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    places = PROJECT["tool"]["setuptools"]["package-dir"]
    data = PROJECT["tool"]["setuptools"]["package-data"]
    assert data == {"ringfa4": ["py.typed"], "ringfa4.launch": ["sm100_counts.json"]}
    expected = {f"{p.replace('.', '/')}/{name}" for p, names in data.items() for name in names}
    for package, directory in places.items():
        for file in (ROOT / directory).rglob("*.py"):
            expected.add(f"{package.replace('.', '/')}/{file.relative_to(ROOT / directory)}")
    names = zipfile.ZipFile(wheel).namelist()
    assert {n for n in names if ".dist-info/" not in n} == expected
    assert any(n.endswith("/licenses/LICENSE") for n in names)


@pytest.mark.slow
def test_the_wheel_imports_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    """Also with the checkout as working directory, whose `ringfa4` has no `kernels` inside."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path.append({str(tmp_path / 'site')!r});"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in str(f)];"
        "import ringfa4.kernels.interface, ringfa4.comm.interface, ringfa4.launch"
    )
    for cwd in (ROOT, tmp_path):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, f"from {cwd}: {done.stderr}"
