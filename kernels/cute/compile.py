"""Spec -> machine code, by NVIDIA's CuTe DSL (``pip install 'ringfa4[cuda]'``). Needs no GPU.

The DSL makes a host function and a device function; only the device function's cubin is kept.
Launching it through the driver (:mod:`ringfa4.kernels.cute.driver`) needs nothing else, and a cubin
on disk holds no host code.
"""

from __future__ import annotations

import re
import tempfile
import threading
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ringfa4.kernels.cute.specs import Spec, parameters

KERNELS = {
    "EncodeSpec": "ringfa4.kernels.cute.encode:Encode",
    "DecodeSpec": "ringfa4.kernels.cute.decode:Decode",
    "MergeSpec": "ringfa4.kernels.cute.merge:Merge",
    "GuardSpec": "ringfa4.kernels.cute.guard:Guard",
    "FillSpec": "ringfa4.kernels.cute.guard:Fill",
    "AccumulateSpec": "ringfa4.kernels.cute.accumulate:Accumulate",
    "ForwardSpec": "ringfa4.kernels.sm100.forward:Forward",
}
"""Name of a spec's class -> module:class, imported when it is compiled."""

_TRACING = threading.Lock()
"""The DSL traces with global state; virtual ranks are threads."""


@dataclass(frozen=True)
class Compiled:
    """A device function: machine code, the name of its entry, PTX."""

    cubin: bytes
    entry: str
    ptx: str


def compile_kernel(spec: Spec, arch: str, export: tuple[Path, str] | None = None) -> Compiled:
    """``spec`` for an architecture such as "sm_90a".

    With ``export`` = (path, name) an object file is written there too: the host function under that
    name, in the calling convention of apache-tvm-ffi, with the device function inside.
    """
    with _TRACING, tempfile.TemporaryDirectory(prefix="ringfa4-") as folder:  # 0700, for dumps
        options = f"--gpu-arch={arch} --keep-ptx --keep-cubin --dump-dir={folder}"
        made = _traced(spec, options + (" --enable-tvm-ffi" if export else ""))
        if export is not None:
            path, name = export
            made.export_to_c(str(path), function_name=name)
        cubin, ptx = bytes(made.__cubin__), str(made.__ptx__)
    entries = re.findall(r"\.entry\s+(\w+)\(", ptx)
    assert len(entries) == 1, entries
    assert _parameters(ptx) == parameters(spec), (_parameters(ptx), parameters(spec))
    return Compiled(cubin, entries[0], ptx)


def _traced(spec: Spec, options: str) -> Any:
    cute = import_module("cutlass.cute")
    cutlass = import_module("cutlass")
    runtime = import_module("cutlass.cute.runtime")
    module, attribute = KERNELS[type(spec).__name__].split(":")
    kernel = getattr(import_module(module), attribute)(spec)
    zeros = {"q": cutlass.Int64(0), "i": cutlass.Int32(0), "f": cutlass.Float32(0.0)}
    arguments = [zeros[letter] for letter in spec.SIGNATURE]
    return cute.compile(kernel, *arguments, runtime.make_fake_stream(), options=options)


def _parameters(ptx: str) -> str:
    """The parameters of the entry as a format of :mod:`struct`."""
    letters = {"u64": "q", "u32": "i", "f32": "f"}
    head = ptx[ptx.index(".entry") : ptx.index(")", ptx.index(".entry"))]
    found = re.findall(r"\.param (?:\.align \d+ )?\.(\w+) \w+(?:\[(\d+)\])?", head)
    return "".join(f"{size}s" if size else letters[kind] for kind, size in found)
