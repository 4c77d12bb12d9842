"""What one run computes: shapes, mask and inputs, from the options, the device and the input file.

Every field is settled here, so that the defaults can be printed. ValueError, with the values, for
what does not fit together; every rank has the same options and file, hence raises it alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringfa4.launch.inputs import FileInputs, Inputs, RandomInputs
from ringfa4.launch.masks import build_mask
from ringfa4.launch.options import Options
from ringfa4.launch.tensorfile import TensorFile
from ringfa4.mask import Mask
from ringfa4.problem import softmax_scale
from ringfa4.wire import Geometry, wire_format

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

BACKWARD_FLOPS = 2.5
"""Matrix products of backward (S, dP, dV, dQ, dK) over those of forward (S, O)."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What is taken when an option is not given, by device."""

    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str


DEFAULT_WIRE = "mxfp8"
"""Half the bytes of bf16, at some 26 dB (docs/numerics.md); the library's own default is exact."""

DEFAULTS = {
    "cpu": Defaults(seq=1 << 16, heads=2, kv_heads=1, head_dim=64, dtype="bf16"),
    "cuda": Defaults(seq=1 << 18, heads=32, kv_heads=8, head_dim=128, dtype="bf16"),
}


@dataclass(frozen=True)
class Workload:
    """q (batch, seq_q, heads, dk), k (.., seq_k, kv_heads, dk), v (.., seq_k, kv_heads, dv)."""

    mask: Mask
    batch: int
    heads: int
    kv_heads: int
    dk: int
    dv: int
    dtype: torch.dtype
    scale: float
    inputs: Inputs
    sink: torch.Tensor | None

    @property
    def seq_q(self) -> int:
        return self.mask.seq_q

    @property
    def seq_k(self) -> int:
        return self.mask.seq_k

    @property
    def pairs(self) -> int:
        """(query, key) pairs that the mask allows, over batch rows and query heads."""
        rows = self.batch if self.mask.batch == 1 else 1
        return self.mask.area * rows * self.heads

    def flops(self, *, backward: bool) -> float:
        """Of the allowed pairs: a multiply-add counts 2; dk + dv of them a pair in forward."""
        return self.pairs * 2 * (self.dk + self.dv) * (BACKWARD_FLOPS if backward else 1)


def choose_wire(options: Options, work: Workload) -> tuple[str, str]:
    """(wire, "" or why this one): ``--wire``, else MXFP8 where it can carry the inputs.

    ValueError for an unknown name.
    """
    if options.wire is not None:
        return wire_format(options.wire, work.dtype).name, ""
    geometry = Geometry(work.batch, work.kv_heads, work.dk, work.dv, work.dtype)
    reason = wire_format(DEFAULT_WIRE, work.dtype).supports(geometry)
    if reason is None:
        return DEFAULT_WIRE, "default"
    return wire_format(None, work.dtype).name, f"as the dtype: {reason}"


def choose_device(options: Options) -> str:
    """``--device``, else "cuda" where there is one. ValueError for cuda without a GPU."""
    available = torch.cuda.is_available()
    if options.device == "cuda" and not available:
        raise ValueError("--device cuda: torch.cuda.is_available() is false")
    return options.device or ("cuda" if available else "cpu")


def build(options: Options, device: str) -> Workload:
    """The workload of ``options``, with the defaults of ``device`` for what they leave out."""
    usual = DEFAULTS[device]
    if options.input is not None:
        return _from_file(options, TensorFile(options.input))
    seq = options.seq
    if seq is None:
        lengths = options.documents or ()
        seq = sum(lengths) if len(lengths) > 1 else usual.seq
    dtype = DTYPES[options.dtype or usual.dtype]
    heads = options.heads or usual.heads
    default_kv = usual.kv_heads if heads % usual.kv_heads == 0 else heads
    dk = options.head_dim or usual.head_dim
    inputs = RandomInputs(options.seed, options.batch or 1, dtype)
    return Workload(
        mask=build_mask(options, seq, seq if options.seq_k is None else options.seq_k),
        batch=inputs.batch,
        heads=heads,
        kv_heads=options.kv_heads or default_kv,
        dk=dk,
        dv=options.v_head_dim or dk,
        dtype=dtype,
        scale=softmax_scale(options.scale, dk),
        inputs=inputs,
        sink=inputs.sink(heads) if options.sink else None,
    )


def _from_file(options: Options, file: TensorFile) -> Workload:
    """Shapes and dtype are the file's; an option that says otherwise is refused."""
    missing = [name for name in ("q", "k", "v") if name not in file]
    if missing:
        raise ValueError(f"{file.path} has no {missing}; it holds {file.names()}")
    shapes = {name: file.shape(name) for name in ("q", "k", "v")}
    if any(len(shape) != 4 for shape in shapes.values()):
        raise ValueError(f"{file.path}: q, k, v must be (b, s, h, d), they are {shapes}")
    batch, seq_q, heads, dk = shapes["q"]
    _, seq_k, kv_heads, _ = shapes["k"]
    dv = shapes["v"][3]
    expected = {"k": (batch, seq_k, kv_heads, dk), "v": (batch, seq_k, kv_heads, dv)}
    if "dout" in file:
        shapes["dout"] = file.shape("dout")
        expected["dout"] = (batch, seq_q, heads, dv)
    if any(shapes[name] != shape for name, shape in expected.items()):
        raise ValueError(f"{file.path}: shapes do not fit together: {shapes}")
    dtypes = {name: file.dtype(name) for name in shapes}
    if len(set(dtypes.values())) > 1:
        raise ValueError(f"{file.path}: q, k, v (and dout) must have one dtype: {dtypes}")
    dtype = dtypes["q"]
    named = {name: value for name, value in DTYPES.items() if value == dtype}
    said = {
        "--seq": (options.seq, seq_q),
        "--seq-k": (options.seq_k, seq_k),
        "--batch": (options.batch, batch),
        "--heads": (options.heads, heads),
        "--kv-heads": (options.kv_heads, kv_heads),
        "--head-dim": (options.head_dim, dk),
        "--v-head-dim": (options.v_head_dim, dv),
        "--dtype": (options.dtype, next(iter(named))),
    }
    for option, (value, there) in said.items():
        if value is not None and value != there:
            raise ValueError(f"{option} {value} contradicts {file.path}, which has {there}")
    drawn = RandomInputs(options.seed, batch, dtype)
    return Workload(
        mask=build_mask(options, seq_q, seq_k),
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        dk=dk,
        dv=dv,
        dtype=dtype,
        scale=softmax_scale(options.scale, dk),
        inputs=FileInputs(file, drawn),
        sink=drawn.sink(heads) if options.sink else None,
    )
