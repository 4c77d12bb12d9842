"""Build the C++ core with g++ into the user's cache, once for each source, compiler and processor.

The cache directory is private (0700, owner checked) and files appear in it by atomic rename, so
that parallel test workers may build at once. Nothing is written into the source tree.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

CORE = Path(__file__).parent / "core"
# No contraction: `mul` then `add` must round twice. No fast maths: NaN and signed zero matter.
FLAGS = ["-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-Wall"]
_PREFIX = {
    "op": "",
    "type": "T_",
    "special": "S_",
    "space": "SP_",
    "flag": "F_",
    "compare": "C_",
    "reduction": "R_",
    "kind": "K_",
    "cp": "CP_",
    "ld": "LD_",
}


@cache
def tables() -> dict[str, dict[str, int]]:
    """The tables of core/tables.txt: name -> number, by table."""
    result: dict[str, dict[str, int]] = {}
    section = ""
    for line in (CORE / "tables.txt").read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
            result[section] = {}
        elif section and line and not line.startswith("#"):
            names = line.split()
            for name in names[:1] if section == "op" else names:
                table = result[section]
                table[name] = 1 << len(table) if section == "flag" else len(table)
    return result


def _header() -> str:
    text = "#pragma once\nnamespace ptx {\n"
    for section, names in tables().items():
        items = ", ".join(f"{_PREFIX[section]}{name} = {value}" for name, value in names.items())
        text += f"enum {section}_table : int {{ {items} }};\n"
    return text + "}  // namespace ptx\n"


def cache_directory() -> Path:
    """A directory only this user can write."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringfa4-ptx"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="ringfa4-ptx-"))
    if root.stat().st_uid != os.getuid() or root.stat().st_mode & 0o022:
        return Path(tempfile.mkdtemp(prefix="ringfa4-ptx-"))
    return root


def compiler() -> str | None:
    """The C++ compiler, or None when the machine has none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("flags")), "")


@cache
def load() -> ctypes.CDLL:
    """The core, built if it is not in the cache yet."""
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("the PTX executor needs g++ (or CXX)")
    sources = {path.name: path.read_text() for path in sorted(CORE.glob("*.[hc]pp"))}
    sources["tables.hpp"] = _header()
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256(repr((sources, FLAGS, version, _processor())).encode()).hexdigest()[:20]
    root = cache_directory()
    library = root / f"core-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=root) as directory:
            for name, text in sources.items():
                (Path(directory) / name).write_text(text)
            built = Path(directory) / "core.so"
            command = [cxx, *FLAGS, str(Path(directory) / "core.cpp"), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"building the PTX core failed:\n{done.stderr[-4000:]}")
            os.replace(built, library)
    return ctypes.CDLL(str(library))
