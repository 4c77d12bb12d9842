"""Ahead of time: the SM100 kernels as one library that needs only apache-tvm-ffi.

    python -m ringfa4.kernels.sm100.build --arch sm_100a --arch sm_103a --out DIR

writes DIR/libringfa4_sm100.so with a function for each architecture and pair of head dimensions,

    tvm_ffi.load_module(path)["forward_sm_100a_128x128"](*Arguments, stream)

(:class:`ringfa4.kernels.sm100.launch.Arguments`, then the handle of a stream), and prints what was
compiled. The block kernel takes them from there when RINGFA4_SM100_LIBRARY is the library's path.

A function encodes its tensor maps, loads its device code on first use, and launches; the CUDA
runtime is linked in, the driver is the machine's. Building needs no GPU, but the CuTe DSL, the CUDA
runtime's static library (the nvidia-cuda-runtime wheel) and a C compiler.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ringfa4.errors import MissingLibraryError
from ringfa4.kernels.cute.compile import compile_kernel
from ringfa4.kernels.sm100.launch import function_name
from ringfa4.kernels.sm100.specs import EMULATED, ForwardSpec

DIMS = ((64, 64), (64, 128), (128, 64), (128, 128), (192, 128))
"""(dk, dv) that are built unless others are asked for."""

LIBRARY = "libringfa4_sm100.so"

ERRORS = """
#include <stdint.h>
#include <stdio.h>
/* The generated code reports what the CUDA runtime returns: as a Python exception. */
typedef void (*raise_t)(const char *kind, const char **parts, int32_t count);
static void report(raise_t raise, const char *what, int32_t number) {
  char text[96];
  snprintf(text, sizeof text, "SM100 forward kernel: %s %d", what, number);
  const char *parts[1] = {text};
  raise("RuntimeError", parts, 1);
}
void CuteDSLRT_TVMFFISetRaisedCudaError(void *raise, int32_t code) {
  report((raise_t)raise, "CUDA error", code);
}
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(void *raise, int32_t blocks) {
  report((raise_t)raise, "a grid that cannot be launched, of thread blocks:", blocks);
}
"""


@dataclass(frozen=True)
class Built:
    """A function of the library; registers and stack are those of a thread at launch."""

    function: str
    seconds: float
    registers: int
    stack_bytes: int
    cubin_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.function}: compiled in {self.seconds:.1f} s, {self.registers} registers, "
            f"{self.stack_bytes} bytes of stack, {self.cubin_bytes / 1024:.0f} KiB"
        )


def build_objects(
    archs: Sequence[str], dims: Sequence[tuple[int, int]], folder: Path
) -> list[Built]:
    """An object file for each function in ``folder``."""
    built = []
    for arch in archs:
        for dk, dv in dims:
            name = function_name(arch, dk, dv)
            start = time.perf_counter()
            spec = ForwardSpec.of(dk, dv, arch)
            made = compile_kernel(spec, arch, (folder / f"{name}.o", name))
            seconds = time.perf_counter() - start
            built.append(Built(name, seconds, *resources(made.cubin), len(made.cubin)))
    return built


def link(objects: Path, library: Path, runtime: Sequence[Path | str] | None = None) -> None:
    """All object files of a folder into ``library``. ``runtime`` None: the CUDA runtime, static."""
    ffi = _package("tvm_ffi", "apache-tvm-ffi") / "lib"
    with tempfile.TemporaryDirectory(prefix="ringfa4-") as folder:
        if runtime is None:
            errors = Path(folder) / "errors.c"
            errors.write_text(ERRORS)
            runtime = [errors, _dialect_runtime(), _cuda_runtime(), "-lrt"]
        command = ["cc", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-o", library]
        command += [*sorted(objects.glob("*.o")), *runtime]
        # Found next to an installed tvm_ffi, which the process that loads this has imported.
        command += [f"-L{ffi}", "-ltvm_ffi", "-lpthread", "-ldl"]
        done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"linking {library} failed: {done.stderr.strip()}")


def _package(name: str, wheel: str) -> Path:
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise MissingLibraryError(f"building the SM100 library needs {name} (pip install {wheel})")
    return Path(next(iter(spec.submodule_search_locations)))


def _dialect_runtime() -> Path:
    """What generated host code calls, over the CUDA runtime."""
    package = _package("cutlass", "'nvidia-cutlass-dsl[cu13]'")
    for parent in package.parents:
        found = parent / "cu13" / "lib" / "libcuda_dialect_runtime_static.a"
        if found.exists():
            return found
    raise MissingLibraryError(
        f"{package} comes without CUDA 13 (pip install 'nvidia-cutlass-dsl[cu13]')"
    )


def _cuda_runtime() -> Path:
    spec = find_spec("nvidia")  # a namespace: wheels may lie in several places
    for folder in (spec and spec.submodule_search_locations) or ():
        for found in Path(folder).rglob("libcudart_static.a"):
            return found
    raise MissingLibraryError("libcudart_static.a is missing (pip install nvidia-cuda-runtime)")


REGISTERS, STACK = 0x2F, 0x12
"""EIATTR_REGCOUNT and EIATTR_MIN_STACK_SIZE in a cubin's .nv.info."""


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of the kernel in a cubin of one; spilled registers need stack."""
    table, entry, count = (
        struct.unpack_from(form, cubin, at)[0] for form, at in (("Q", 40), ("H", 58), ("H", 60))
    )
    sections = [struct.unpack_from("IIQQQQ", cubin, table + n * entry) for n in range(count)]
    names = sections[struct.unpack_from("H", cubin, 62)[0]][4]
    found: dict[int, int] = {}
    for name, _, _, _, offset, size in sections:
        start = names + name
        if cubin[start : cubin.index(b"\0", start)] != b".nv.info":
            continue
        at = offset
        while at < offset + size:
            form, kind, length = struct.unpack_from("BBH", cubin, at)
            if form == 4 and kind in (REGISTERS, STACK):  # (index of a symbol, value)
                found[kind] = struct.unpack_from("II", cubin, at + 4)[1]
            at += 4 + (length if form == 4 else 0)
    return found[REGISTERS], found[STACK]


def _pair(text: str) -> tuple[int, int]:
    dk, _, dv = text.partition("x")
    if not (dk.isdigit() and dv.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 128x128")
    reason = ForwardSpec.refusal(int(dk), int(dv))
    if reason is not None:
        raise argparse.ArgumentTypeError(reason)
    return int(dk), int(dv)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", action="append", choices=sorted(EMULATED), help="default: all")
    parser.add_argument("--dims", action="append", type=_pair, metavar="DKxDV", help="default: all")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args(arguments)
    archs, dims = options.arch or sorted(EMULATED), options.dims or DIMS
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="ringfa4-") as folder:
            for function in build_objects(archs, dims, Path(folder)):
                print(function)
            link(Path(folder), options.out / LIBRARY)
    except (MissingLibraryError, RuntimeError) as error:
        sys.exit(f"build.py: error: {error}")
    print(options.out / LIBRARY)


if __name__ == "__main__":
    main()
