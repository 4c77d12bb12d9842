"""How a run reads: the settings before it, the results after it, and both as JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from ringfa4.launch.checks import RMS_LIMIT, WORST_LIMIT
from ringfa4.launch.options import Options
from ringfa4.launch.runs import Report
from ringfa4.launch.sizes import bytes_text, seconds_text, size_text
from ringfa4.launch.workload import Workload, choose_wire

TOLERANCE = (
    f"tolerance: rms <= {RMS_LIMIT:g} sigma, worst <= {WORST_LIMIT:g} sigma, where sigma^2 is the "
    "variance that rounding explains, element by\nelement: half an ulp of the dtype (and of the "
    "wire's blocks) for each operand, partial and result (launch/checks.py)"
)


def settings(
    options: Options, work: Workload, device: str, world: int, threads: int | None = None
) -> list[tuple[str, str, str]]:
    """(name, value, "default on cpu" or ""), everything a run depends on.

    ``threads``: of each rank, when they are not this process's.
    """
    usual = f"default on {device}"
    from_file = "from --input" if options.input else ""

    def told(value: object, otherwise: str = usual) -> str:
        return "" if value is not None else from_file or otherwise

    lengths = size_text(work.seq_q)
    if work.seq_k != work.seq_q:
        lengths += f" queries, {size_text(work.seq_k)} keys"
    kind = "virtual ranks (threads)" if options.virtual_ranks else "rank(s)"
    threads = torch.get_num_threads() if threads is None else threads
    return [
        ("device", f"{device}, {world} {kind}, {threads} thread(s) each", told(options.device, "")),
        ("tokens", lengths, told(options.seq)),
        ("batch", str(work.batch), told(options.batch)),
        ("heads", f"{work.heads}", told(options.heads)),
        ("K/V heads", f"{work.kv_heads}", told(options.kv_heads)),
        ("head dim", f"{work.dk} (V: {work.dv})", told(options.head_dim)),
        ("dtype", str(work.dtype).removeprefix("torch."), told(options.dtype)),
        ("wire", *choose_wire(options, work)),
        ("precondition", options.precondition, ""),
        ("mask", f"{work.mask.name}, {work.pairs // work.heads:,} pairs a head", ""),
        ("sharding", options.sharding, ""),
        *([("domains", str(options.domains), "")] if options.domains else []),
        ("seed", str(options.seed), ""),
    ]


def results(report: Report) -> list[tuple[str, ...]]:
    """One row a pass."""
    rows: list[tuple[str, ...]] = [
        ("", "time", "tokens/s", "TFLOP/s", "moved", "K/V (of bf16's)", "alone", "waited", "hidden")
    ]
    for name, p in report.passes.items():
        hidden = "-" if p.hidden is None else f"{100 * p.hidden:.0f}%"
        alone, waited = (
            "-" if s is None else seconds_text(s) if p.moved_bytes else "-"
            for s in (p.alone_s, p.waited_s)
        )
        rows.append(
            (
                name,
                seconds_text(p.seconds),
                f"{p.tokens_per_s:,.0f}",
                f"{p.tflop_per_s:.3g}",
                bytes_text(p.moved_bytes),
                f"{bytes_text(p.kv_bytes)} ({100 * p.kv_share:.0f}%)" if p.kv_bytes else "-",
                alone,
                waited,
                hidden if p.moved_bytes else "-",
            )
        )
    return rows


def verdicts(report: Report) -> list[tuple[str, ...]]:
    """One row a checked tensor."""
    rows: list[tuple[str, ...]] = [("", "rows", "SQNR", "max error", "rms", "worst", "at", "")]
    for v in report.verdicts:
        rows.append(
            (
                v.name,
                str(v.rows),
                f"{v.sqnr_db:.1f} dB",
                f"{v.max_error:.2e}",
                f"{v.rms:.2f} sigma",
                f"{v.worst:.2f} sigma",
                str(v.worst_position),
                "ok" if v.passed else "FAILED",
            )
        )
    return rows


def json_text(
    options: Options,
    work: Workload,
    device: str,
    world: int,
    command: str,
    report: Report,
    threads: int | None = None,
) -> str:
    """Everything above, for programs; what is not finite becomes null."""
    body = {
        "command": command,
        "torch": torch.__version__,
        "world": world,
        "settings": {n: v for n, v, _ in settings(options, work, device, world, threads)},
        "pairs": work.pairs,
        **report.as_json(),
    }
    return json.dumps(_finite(body), indent=2)


def _finite(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def peak(report: Report) -> str:
    return f"peak memory of a process: {bytes_text(report.peak_bytes)}"
