"""What the SM100 kernel becomes: compile times, registers, stack, and the machine's opcodes.

    python -m sm100.sass [128x128 ...]       # from tests/; needs the CuTe DSL and nvdisasm

prints a line for each architecture and pair of head dimensions: docs/sm100.md has them. nvdisasm
comes with the CUDA toolkit or the nvidia-cuda-nvdisasm wheel.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from ringfa4.kernels.cute.compile import Compiled, compile_kernel
from ringfa4.kernels.sm100.build import DIMS, resources
from ringfa4.kernels.sm100.specs import EMULATED, ForwardSpec

SHOWN = ("UTCQMMA", "UTCCP", "LDTM", "STTM", "UTMALDG", "UBLKCP", "MUFU.EX2", "FFMA2", "LDL", "STL")
"""Block-scaled products, scales into tensor memory, tensor memory to and from registers, tensor
copies, bulk copies, exponentials, packed fp32, and local memory, which there must be none of."""


def nvdisasm() -> Path | None:
    on_path = shutil.which("nvdisasm")
    if on_path is not None:
        return Path(on_path)
    spec = find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for found in Path(folder).rglob("nvdisasm"):
            return found
    return None


def opcodes(cubin: bytes) -> Counter[str]:
    """How often each opcode of SHOWN occurs in the machine code, in all its variants."""
    tool = nvdisasm()
    assert tool is not None, "nvdisasm is not installed"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-c", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", text, re.M)
    assert len(found) > 1000, f"{len(found)} instructions: nvdisasm prints in another way"
    return Counter(
        shown for name in found for shown in SHOWN if name == shown or name.startswith(shown + ".")
    )


def timed(spec: ForwardSpec, arch: str) -> tuple[Compiled, float]:
    start = time.perf_counter()
    made = compile_kernel(spec, arch)
    return made, time.perf_counter() - start


def main() -> None:
    dims = [tuple(map(int, pair.split("x"))) for pair in sys.argv[1:]] or DIMS
    compile_kernel(ForwardSpec.of(*dims[0], "sm_100a"), "sm_100a")  # imports the DSL
    print("arch", "ctas", "dk x dv", "emulated", "seconds", "registers", "stack", *SHOWN, sep=" | ")
    for arch in EMULATED:
        for dk, dv in dims:
            spec = ForwardSpec.of(dk, dv, arch)
            made, seconds = timed(spec, arch)
            counts = opcodes(made.cubin)
            print(
                arch, spec.ctas, f"{dk} x {dv}", spec.emulated, f"{seconds:.1f}",
                *resources(made.cubin), *(counts[name] for name in SHOWN), sep=" | ",
            )  # fmt: skip


if __name__ == "__main__":
    main()
