"""Machines as the simulator knows them: rates, each with its source.

    machine = MACHINES["gb200-nvl72"]
    machine.rate("link_gbs")                        # 744.0
    machine.replaced({"link_gbs": 600.0})           # what a command line says instead

Units: TFLOP/s = 1e12 FLOP/s of the pairs that a mask allows; GB/s = 1e9 bytes/s, of one GPU and one
direction; copy_gbs counts reads and writes. A source says "measured", "nominal", "published" or
"assumed"; nothing here was measured on an NVL72.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

RATES = {
    "forward_mxfp8": "TFLOP/s of an MXFP8 forward kernel",
    "backward_mxfp8": "TFLOP/s of an MXFP8 backward kernel",
    "forward_bf16": "TFLOP/s of a bf16 forward kernel",
    "backward_bf16": "TFLOP/s of a bf16 backward kernel",
    "link_gbs": "GB/s that a GPU reads from others of its NVLink domain, and gives them",
    "nic_gbs": "GB/s that a GPU receives from other domains, and sends",
    "copy_gbs": "GB/s of passes over memory (merge, encode, sums), reads and writes together",
    "drag": "how much longer compute takes beside a transfer, as a share of its time over NVLink",
    "agree_us": "us for the headers that open a call",
    "step_us": "us a step costs beside its work (launches, gaps)",
    "transfer_us": "us before a transfer's first byte (flags, start of the copy)",
    "memory_gib": "GiB of memory",
}
"""Every rate and what it is."""

ZERO_ALLOWED = ("drag", "agree_us", "step_us", "transfer_us")


@dataclass(frozen=True, slots=True)
class Rate:
    value: float
    source: str


@dataclass(frozen=True)
class Machine:
    """``domain``: GPUs that reach each other by NVLink. ``two_sided``: a transfer needs both ends
    to have come to its step (gloo, NCCL), instead of being pulled.
    """

    name: str
    domain: int
    rates: Mapping[str, Rate]
    two_sided: bool = False

    def __post_init__(self) -> None:
        if self.domain < 1:
            raise ValueError(f"a domain holds at least one GPU: {self.domain=}")
        for name, rate in self.rates.items():
            if name not in RATES:
                raise ValueError(f"unknown rate {name!r}; there are {sorted(RATES)}")
            if not (rate.value > 0 or (rate.value == 0 and name in ZERO_ALLOWED)):
                raise ValueError(f"rate {name} must be positive, not {rate.value}")

    def rate(self, name: str) -> float:
        """ValueError when this machine has no such rate."""
        if name not in self.rates:
            raise ValueError(
                f"machine {self.name!r} has no rate {name!r} ({RATES[name]}): give --rate {name}=X"
            )
        return self.rates[name].value

    def replaced(self, values: Mapping[str, float]) -> Machine:
        """With rates from the command line."""
        said = {name: Rate(value, "given: --rate") for name, value in values.items()}
        return replace(self, rates={**self.rates, **said})


CUDNN = "cuDNN frontend CSV, 32K causal, 64:8 heads, d 128"
NVLINK5 = Rate(
    744.0,
    "nominal 900 (NVLink 5) x 0.83, the share that pulls reach on H200 (372 of 450, measured)",
)
NIC_400G = Rate(45.0, "assumed: 90% of nominal 400 Gb/s a GPU")
BLACKWELL_COPY = Rate(
    6260.0,
    "nominal 8,000 x 0.87 x 0.9: measured on H200, a copy's share of 4.8 TB/s and a merge's of it",
)
DRAG = Rate(0.27, "measured on 2x H200: +0.22 ms beside a pull of 0.84 ms (docs/benchmarks.md)")
GPU_LATENCIES = {
    "agree_us": Rate(500.0, "assumed: headers over gloo, every rank to every rank"),
    "step_us": Rate(20.0, "assumed: gaps between kernels"),
    "transfer_us": Rate(10.0, "assumed: flag wait and start of a copy engine"),
}


def _nvl72(name: str, kernels: tuple[float, float, float, float], memory: float) -> Machine:
    names = ("forward_mxfp8", "backward_mxfp8", "forward_bf16", "backward_bf16")
    published = f"published: {CUDNN}, {name[:5].upper()}"
    rates = {n: Rate(v, published) for n, v in zip(names, kernels, strict=True)}
    rates |= {"link_gbs": NVLINK5, "nic_gbs": NIC_400G, "copy_gbs": BLACKWELL_COPY, "drag": DRAG}
    rates |= GPU_LATENCIES
    rates["memory_gib"] = Rate(memory, "nominal")
    return Machine(name, 72, rates)


H200_BF16 = "measured on H200: FA4 direct, 128K causal, 8 heads, d 128 (docs/benchmarks.md)"

MACHINES = {
    machine.name: machine
    for machine in (
        _nvl72("gb200-nvl72", (2046.0, 1425.0, 1622.0, 1226.0), 173.0),
        _nvl72("gb300-nvl72", (2785.0, 1590.0, 1953.0, 1490.0), 260.0),
        Machine(
            "h200x8",
            8,
            {
                "forward_bf16": Rate(659.0, H200_BF16),
                "backward_bf16": Rate(628.0, H200_BF16),
                "link_gbs": Rate(372.0, "measured on 2x H200: pull of 256 MB, both ways at once"),
                "nic_gbs": NIC_400G,
                "copy_gbs": Rate(3850.0, "measured on H200: merges (docs/benchmarks.md)"),
                "drag": DRAG,
                **GPU_LATENCIES,
                "memory_gib": Rate(131.0, "nominal 141 GB"),
            },
        ),
    )
}
"""name -> machine."""


def machine_named(name: str) -> Machine:
    """ValueError for unknown names."""
    if name not in MACHINES:
        raise ValueError(f"unknown machine {name!r}; there are {sorted(MACHINES)}")
    return MACHINES[name]
