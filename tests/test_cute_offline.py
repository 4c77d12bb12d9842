"""The fused kernels without a GPU: they compile where the DSL is installed; their cache is safe."""

from __future__ import annotations

import json
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import pytest

from ringfa4.kernels.cute import cache
from ringfa4.kernels.cute.cache import Binary
from ringfa4.kernels.cute.specs import (
    AccumulateSpec,
    DecodeSpec,
    EncodeSpec,
    FillSpec,
    GuardSpec,
    MergeSpec,
    Spec,
)

SPEC = MergeSpec.of("bf16", 128, 8, 1, False)

needs_dsl = pytest.mark.skipif(
    find_spec("cutlass") is None,
    reason="needs the CuTe DSL (pip install 'ringfa4[cuda]'); no GPU",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty user cache; the DSL's version is made up, so that it need not be installed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache.dsl_version.cache_clear()
    monkeypatch.setattr(cache, "dsl_version", lambda: "1.2.3")
    yield tmp_path / "ringfa4" / "kernels"


class Builder:
    """Counts how often it is asked."""

    def __init__(self, content: bytes = b"\x7fELF\n\x00code") -> None:
        self.content, self.calls = content, 0

    def __call__(self, spec: Spec, arch: str) -> Binary:
        self.calls += 1
        return Binary(self.content, "entry")


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*.cubin")
    return path


# ---- the cache ----------------------------------------------------------------------------------


def test_built_once_then_read(folder: Path):
    build = Builder()
    first = cache.load(SPEC, "sm_90a", build)
    assert cache.load(SPEC, "sm_90a", build) == first == Binary(build.content, "entry")
    assert build.calls == 1
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(folder).stat().st_mode) == 0o600


def test_the_key_is_everything_that_decides_the_code(folder: Path, monkeypatch: pytest.MonkeyPatch):
    build = Builder()
    cache.load(SPEC, "sm_90a", build)
    cache.load(SPEC, "sm_100a", build)
    cache.load(MergeSpec.of("bf16", 128, 8, 2, False), "sm_90a", build)
    monkeypatch.setattr(cache, "dsl_version", lambda: "1.2.4")
    cache.load(SPEC, "sm_90a", build)
    monkeypatch.setattr(cache, "source_digest", lambda _: "edited")
    cache.load(SPEC, "sm_90a", build)
    assert build.calls == 5


@pytest.mark.parametrize("damage", ["truncated", "flipped", "another key", "no header"])
def test_damaged_files_are_built_anew(folder: Path, damage: str):
    build = Builder(bytes(range(256)))
    cache.load(SPEC, "sm_90a", build)
    path = only_file(folder)
    head, _, code = path.read_bytes().partition(b"\n")
    if damage == "truncated":
        path.write_bytes(head + b"\n" + code[:-1])
    elif damage == "flipped":
        path.write_bytes(head + b"\n" + code[:-1] + bytes([code[-1] ^ 1]))
    elif damage == "another key":
        about = json.loads(head)
        path.write_bytes(json.dumps({**about, "key": "other"}).encode() + b"\n" + code)
    else:
        path.write_bytes(code)
    assert cache.load(SPEC, "sm_90a", build).cubin == build.content
    assert build.calls == 2
    cache.load(SPEC, "sm_90a", build)
    assert build.calls == 2


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_not_used(folder: Path, mode: int):
    build = Builder()
    cache.load(SPEC, "sm_90a", build)
    folder.chmod(mode)
    with pytest.warns(UserWarning, match="others may write"):
        cache.load(SPEC, "sm_90a", build)
    assert build.calls == 2


def test_a_folder_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch):
    build = Builder()
    cache.load(SPEC, "sm_90a", build)
    own = os.geteuid()
    monkeypatch.setattr(cache.os, "geteuid", lambda: own + 1)
    with pytest.warns(UserWarning, match=f"belongs to user {own}"):
        cache.load(SPEC, "sm_90a", build)
    assert build.calls == 2


def test_links_are_not_followed(folder: Path, tmp_path: Path):
    build = Builder()
    cache.load(SPEC, "sm_90a", build)
    path, elsewhere = only_file(folder), tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(OSError):
        cache.load(SPEC, "sm_90a", build)
    path.unlink()
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    with pytest.warns(UserWarning, match="is a link"):
        cache.load(SPEC, "sm_90a", build)


def test_a_file_that_others_may_write_to_is_not_used(folder: Path):
    build = Builder()
    cache.load(SPEC, "sm_90a", build)
    only_file(folder).chmod(0o622)
    with pytest.warns(UserWarning, match="others may write"):
        cache.load(SPEC, "sm_90a", build)
    assert build.calls == 2


def test_without_a_folder_every_process_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    build = Builder()
    for _ in range(2):
        with pytest.warns(UserWarning, match="not kept"):
            cache.load(SPEC, "sm_90a", build)
    assert build.calls == 2


def test_a_failed_build_leaves_nothing_and_can_be_repeated(folder: Path):
    def broken(spec: Spec, arch: str) -> Binary:
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        cache.load(SPEC, "sm_90a", broken)
    assert not list(folder.glob("*.cubin")) and not list(folder.glob("*.part"))
    assert cache.load(SPEC, "sm_90a", Builder()).entry == "entry"


def _race(base: str, log: str, barrier: object) -> None:
    """In a process of its own: note each build in ``log``."""
    os.environ["XDG_CACHE_HOME"] = base
    cache.dsl_version = lambda: "1.2.3"

    def build(spec: Spec, arch: str) -> Binary:
        with open(log, "a") as file:
            file.write("built\n")
        threading.Event().wait(0.3)  # long enough for the others to arrive at the lock
        return Binary(b"code", "entry")

    barrier.wait()  # type: ignore[attr-defined]
    assert cache.load(SPEC, "sm_90a", build).cubin == b"code"


def test_of_many_processes_one_builds(tmp_path: Path):
    context = get_context("fork")
    barrier, log = context.Barrier(4), tmp_path / "log"
    ranks = [context.Process(target=_race, args=(str(tmp_path), log, barrier)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    assert log.read_text() == "built\n"


# ---- specs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 64])
@pytest.mark.parametrize("dv", [8, 64, 96, 128, 192, 256, 512])
def test_blocks_of_a_merge_share_sectors_and_fit(heads: int, dv: int):
    spec = MergeSpec.of("bf16", dv, heads, 1, False)
    assert spec.tokens % 8 == 0 and 1 <= spec.heads <= heads
    assert 1 <= spec.units <= 16, "the runs of a thread are loaded at once"


@pytest.mark.parametrize("d", [8, 24, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_threads_of_a_guard_share_rows_evenly(dtype: str, d: int):
    spec = GuardSpec(dtype, d, True, False)
    pieces = d * (4 if dtype == "fp32" else 2) // 16
    assert spec.lanes <= min(16, pieces) and spec.lanes & (spec.lanes - 1) == 0
    assert spec.lanes * spec.groups == GuardSpec.THREADS and 32 % spec.lanes == 0


# ---- compiling ----------------------------------------------------------------------------------

SPECS: dict[str, Callable[[bool], Spec]] = {
    "encode tiles": lambda hw: EncodeSpec("bf16", 128, 32, 32, "d", True, True, False, hw),
    "encode tiles, seq": lambda hw: EncodeSpec("bf16", 64, 32, 32, "seq", False, True, True, hw),
    "encode 1x32": lambda hw: EncodeSpec("fp16", 96, 1, 32, "d", True, False, False, hw),
    "encode 32x1": lambda hw: EncodeSpec("fp32", 256, 32, 1, "seq", False, True, False, hw),
    "decode": lambda hw: DecodeSpec("bf16", 128, "d", "d", hw),
    "decode, seq": lambda hw: DecodeSpec("fp16", 192, "seq", "seq", hw),
    "merge": lambda hw: MergeSpec.of("bf16", 128, 8, 4, False),
    "merge, first": lambda hw: MergeSpec.of("fp32", 96, 3, 1, True),
    "accumulate": lambda hw: AccumulateSpec("bf16", 96, False),
    "accumulate 4": lambda hw: AccumulateSpec("bf16", 128, False, partials=4),
    "round": lambda hw: AccumulateSpec("fp32", 96, True, "bf16"),
    "guard": lambda hw: GuardSpec("bf16", 80, True, False),
    "fill": lambda hw: FillSpec(256, -1),
}


@needs_dsl
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", SPECS)
def test_compiles(name: str, arch: str):
    """To machine code, without local memory: an array in memory would mean a run-time index."""
    from ringfa4.kernels.cute.compile import compile_kernel

    spec = SPECS[name](arch != "sm_80")
    made = compile_kernel(spec, arch)
    cubin, entry, ptx = made.cubin, made.entry, made.ptx
    assert cubin.startswith(b"\x7fELF") and entry.encode() in cubin
    assert f".target {arch}" in ptx
    assert not re.search(r"\.local|ld\.local|st\.local", ptx)
    assert ("e4m3x2" in ptx) == (arch != "sm_80" and isinstance(spec, EncodeSpec | DecodeSpec))
    if isinstance(spec, EncodeSpec | GuardSpec):
        assert "ld.global.L1::no_allocate.v4.b32" in ptx, "16 bytes a load"


@needs_dsl
@pytest.mark.parametrize("final", [False, True], ids=["", "final"])
@pytest.mark.parametrize("partials", [1, 2, 4])
def test_runs_are_merged_between_stores(partials: int, final: bool):
    """Merged all before the first store, ptxas merges between the loads, and fewer are under way:
    65 % of the bandwidth of a copy for four partials, measured on an H200.
    """
    from ringfa4.kernels.cute.compile import compile_kernel

    ptx = compile_kernel(MergeSpec.of("bf16", 128, 8, partials, False, final), "sm_90a").ptx
    lines = ptx.splitlines()
    at = [n for n, line in enumerate(lines) if "fma.rn" in line or "mul.rn" in line]
    first_store = next(n for n, line in enumerate(lines) if "st.global" in line)
    assert sum(n > first_store for n in at) > len(at) / 2, "all but the first run's"
