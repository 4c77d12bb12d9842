"""Compiled kernels on disk, so that a process does not compile what another one has compiled.

    <user cache>/ringfa4/kernels/<hash>.cubin   JSON (entry, digest, key) in a line, then the cubin

The key is a hash over the DSL's version, the architecture, the spec and the kernel's source, so
nothing stale is ever found. The user cache is ``$XDG_CACHE_HOME``, or ``~/.cache``.

Loading compiled code is running it, so the folder must be the user's own: it is made with mode 0700
and used only if this user owns it and nobody else may write to it; files are opened without
following links and held to the same. There is no fallback to a shared temporary folder: without a
safe folder kernels are compiled by each process, after a warning that says why. A file appears
whole, by rename, and a lock file per kernel lets one of many ranks compile while the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ringfa4.kernels.cute.specs import Spec

FORMAT = 1


@dataclass(frozen=True)
class Binary:
    """A cubin and the name of the kernel in it."""

    cubin: bytes
    entry: str


@cache
def dsl_version() -> str:
    """Version of the CuTe DSL; imports it only when its package metadata is missing."""
    try:
        return version("nvidia-cutlass-dsl")
    except PackageNotFoundError:
        return str(import_module("cutlass").__version__)


@cache
def source_digest(module: str) -> str:
    """Hash over this package's source files and those beside ``module``: editing a kernel must not
    find the old one.
    """
    other = sys.modules[module].__file__
    assert other is not None, module
    total = hashlib.sha256()
    for folder in sorted({Path(__file__).parent, Path(other).parent}):
        for path in sorted(folder.glob("*.py")):
            total.update(path.read_bytes())
    return total.hexdigest()


def kernel_key(spec: Spec, arch: str) -> str:
    """Everything that decides the machine code, readable."""
    source = source_digest(type(spec).__module__)
    return f"format {FORMAT}; dsl {dsl_version()}; {arch}; {spec!r}; source {source}"


def cache_folder() -> Path | None:
    """The folder, made if need be; None, with a warning, when it cannot be used safely."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "ringfa4" / "kernels"
    try:
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        reason = _unsafe(folder.lstat(), directory=True)
    except OSError as error:
        reason = str(error)
    if reason is None:
        return folder
    warnings.warn(f"compiled kernels are not kept: {folder}: {reason}", stacklevel=2)
    return None


def _unsafe(status: os.stat_result, *, directory: bool) -> str | None:
    """Why code must not be loaded from there, or None."""
    kind = stat.S_ISDIR if directory else stat.S_ISREG
    if not kind(status.st_mode):
        return "is a link or not of the expected kind"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, this process runs as {os.geteuid()}"
    if status.st_mode & 0o022:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def load(spec: Spec, arch: str, build: Callable[[Spec, str], Binary]) -> Binary:
    """The kernel from disk, or built (by one process at a time) and kept."""
    folder = cache_folder()
    if folder is None:
        return build(spec, arch)
    key = kernel_key(spec, arch)
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    found = _read(path, key)
    if found is None:
        with _locked(path.with_suffix(".lock")):
            found = _read(path, key)  # another process may have built it while this one waited
            if found is None:
                found = build(spec, arch)
                _write(path, key, found)
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive over processes and threads; released by the kernel if this process dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(path: Path, key: str) -> Binary | None:
    """The file's kernel; None when there is none, or not this one whole."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        reason = _unsafe(os.fstat(file.fileno()), directory=False)
        if reason is not None:
            warnings.warn(f"a compiled kernel is not used: {path}: {reason}", stacklevel=2)
            return None
        head, _, cubin = file.read().partition(b"\n")
    try:
        about = json.loads(head)
    except ValueError:
        return None
    digest = hashlib.sha256(cubin).hexdigest()
    if about.get("key") != key or about.get("sha256") != digest:
        return None
    return Binary(cubin, about["entry"])


def _write(path: Path, key: str, binary: Binary) -> None:
    digest = hashlib.sha256(binary.cubin).hexdigest()
    head = json.dumps({"key": key, "entry": binary.entry, "sha256": digest})
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(head.encode() + b"\n" + binary.cubin)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
