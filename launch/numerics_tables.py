"""Measure what MXFP8 costs and write the tables of docs/numerics.md.

    python -m ringfa4.launch.numerics_tables                            print all tables
    python -m ringfa4.launch.numerics_tables --only tiles --seq 1024    one, smaller
    python -m ringfa4.launch.numerics_tables --write docs/numerics.md   replace them in the page

Everything is measured against attention in fp64 on the unrounded bf16 inputs, as SQNR in dB: 10
log10 (sum true^2 / sum (got - true)^2), over O, dQ, dK, dV of one head, d = 128, full attention.
Seeds are fixed. Kernels run through wire, plan and state as in the ring, all ranks in this process;
the backward pass starts from the kernel's own out and lse, as in the ring.
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ringfa4.grads import Grads
from ringfa4.kernels.registry import load_kernel
from ringfa4.mask import Mask, full
from ringfa4.mx.formats import ALONG_D, ALONG_SEQ, E4M3, TILE, ScaleRounding
from ringfa4.mx.quantise import quantise, rounded
from ringfa4.mx.wire import MXFP8, MXFP8_1X32, MxWire
from ringfa4.plan import Plan
from ringfa4.precondition import Precondition, row_sums, shift
from ringfa4.shard import Chunk, Shard, contiguous
from ringfa4.state import State
from ringfa4.wire import PLAIN, Direction, EncodedShard, Geometry, RecordMap, wire_format

D = 128
OUTLIERS = [3, 40, 77, 110]
"""Channels that are large: one in each block of 32."""


@dataclass(frozen=True)
class Inputs:
    """q, k, v, dout (1, s, 1, d), bf16."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


@dataclass(frozen=True)
class Results:
    """What attention returns both ways."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def sqnr(got: Tensor, true: Tensor) -> float:
    """Signal to noise in dB."""
    got, true = got.double(), true.double()
    return 10 * math.log10(true.square().sum().item() / (got - true).square().sum().item())


def decibels(got: Results, true: Results) -> tuple[float, float, float, float]:
    """SQNR of O, dQ, dK, dV."""
    return (
        sqnr(got.out, true.out),
        sqnr(got.dq, true.dq),
        sqnr(got.dk, true.dk),
        sqnr(got.dv, true.dv),
    )


# ---- inputs -------------------------------------------------------------------------------------


def _unit(x: Tensor) -> Tensor:
    return x / x.square().mean().sqrt()


def _gaussian(n: Callable[..., Tensor], s: int) -> tuple[Tensor, Tensor, Tensor]:
    return n(s, D), n(s, D), n(s, D)


def _outliers(n: Callable[..., Tensor], s: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _gaussian(n, s)
    for x in (q, k):
        x[:, OUTLIERS] *= 30
    return _unit(q), _unit(k), v


def _biased(n: Callable[..., Tensor], s: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _gaussian(n, s)
    return q, (k + 10 * n(D)) / 2, v


def _norms(n: Callable[..., Tensor], s: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _gaussian(n, s)
    return q, k * n(s, 1).exp(), v * n(s, 1).exp()


def _student(n: Callable[..., Tensor], s: int) -> tuple[Tensor, Tensor, Tensor]:
    def t(s: int) -> Tensor:
        return n(s, D) / (n(3, s, D).square().sum(0) / 3).sqrt()

    return t(s), t(s), t(s)


def _sink(n: Callable[..., Tensor], s: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _gaussian(n, s)
    q[:, 0], k[:, 0], v = 1, 0, v + 1
    k[0], v[0] = 0, 0
    k[0, 0] = 160  # logit 160 / sqrt(128) = 14.1, and exact in E4M3
    return q, k, v


DISTRIBUTIONS = {
    "Gaussian": _gaussian,
    "outliers": _outliers,
    "biased": _biased,
    "token norms": _norms,
    "Student-t(3)": _student,
    "sink key": _sink,
}
"""Gaussian: all N(0, 1). Outliers: 4 of 128 channels of Q and K 30 times larger, then both scaled
to unit rms. Biased: the channels of K have means 10 times their deviation, which is 0.5. Token
norms: K and V times log-normal(0, 1) per token. Sink key: key 0 has logit 14 for every query and V
= 0; other V have mean 1."""


def inputs(name: str, seq: int, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def n(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = DISTRIBUTIONS[name](n, seq)
    return Inputs(*(x.bfloat16().view(1, seq, 1, D) for x in (q, k, v, n(seq, D))))


# ---- one attention, any kernel and wire, all ranks in this process ------------------------------


def attend(
    x: Inputs,
    kernel: str,
    wire: str | None,
    *,
    precondition: str = "none",
    ranks: int = 1,
    lse_shift: float = 0.0,
    mask: Mask | None = None,
) -> Results:
    """Forward and backward; ``lse_shift`` is added to lse in between, as if other keys had been
    merged into it.
    """
    block, pre = load_kernel(kernel), Precondition.parse(precondition)
    form, handed = wire_format(wire, x.k.dtype), block.gradient_dtype(x.k.dtype)
    seq, scale = x.q.shape[1], D**-0.5
    plan = Plan(mask or full(seq), contiguous(seq, ranks), contiguous(seq, ranks))
    shards = plan.k_sharding.shards
    geometry = Geometry(1, 1, D, D, x.k.dtype)
    owned = [slice(s.chunks[0].start, s.chunks[0].start + len(s)) for s in shards]
    mu = pre.mean(x.k, lambda total: total)
    queries, keys = pre.queries(x.q), pre.keys(x.k, mu)
    out, dq = torch.empty_like(x.v), x.q.new_empty(x.q.shape, dtype=torch.float32)
    lse = x.q.new_empty(1, 1, seq, dtype=torch.float32)
    dk, dv = (torch.zeros(x.k.shape) for _ in range(2))
    views: dict[Direction, list[EncodedShard]] = {"forward": [], "backward": []}
    for direction, records in views.items():
        for own, shard in zip(owned, shards, strict=True):
            size = shard.records * form.record_bytes(geometry, direction)
            box = torch.empty(size, dtype=torch.uint8)
            form.encode(keys[:, own], x.v[:, own], shard, box, direction)
            where = RecordMap.whole(shard)
            records.append(form.view(geometry, where, box, direction))
    for rank, own in enumerate(owned):
        state = State(1, len(shards[rank]), 1, D, device=x.q.device)
        operands = block.prepare(queries[:, own], shards[rank])
        for step in plan.steps(rank):
            block.forward(operands, views["forward"][step.owner], step.tasks, scale, state)
        moved = 0 if mu is None else shift(x.q[:, own], mu, scale)
        state.max += moved
        out[:, own], lse[:, :, own] = state.finalise(x.q.dtype)
        given = lse[:, :, own] + lse_shift
        operands = block.prepare_backward(
            queries[:, own], shards[rank], out[:, own], x.dout[:, own], given - moved, None
        )
        grads = Grads(1, len(shards[rank]), 1, D, device=x.q.device)
        for step in plan.steps(rank):
            where = RecordMap.whole(shards[step.owner])
            travels = PLAIN[handed if step.index else torch.float32]  # the own are sums
            size = where.records * travels.record_bytes(geometry, "backward")
            box = torch.empty(size, dtype=torch.uint8)
            parts = travels.view(geometry, where, box, "backward")
            grads.begin(parts)
            block.backward(operands, views["backward"][step.owner], step.tasks, scale, grads)
            grads.end()
            count = len(shards[step.owner])
            for total, part in zip((dk, dv), parts.keys_values(0, 0, count), strict=True):
                total[:, owned[step.owner]] += part
        delta = (out[:, own].float() * x.dout[:, own].float()).sum(-1).transpose(1, 2)
        sums = row_sums(delta, given, None, None)
        dq[:, own] = pre.query_gradient(grads.finish(), mu, sums, scale)
    return Results(out, lse, dq, pre.key_gradient(dk), dv)


def truth(x: Inputs, *, lse_shift: float = 0.0) -> Results:
    return attend(x, "reference", None, lse_shift=lse_shift)


def with_rounded_queries(x: Inputs) -> Inputs:
    q = rounded(x.q[:, :, 0].float(), TILE).bfloat16().unsqueeze(2)  # exact: 4 significant bits
    return replace(x, q=q)


# ---- tables -------------------------------------------------------------------------------------

Row = Sequence[str]


def _db(values: Sequence[float]) -> list[str]:
    return [f"{value:.1f}" for value in values]


def rounding_table(seq: int) -> list[Row]:
    """What each rounding costs, Gaussian inputs, 32 x 32 tiles."""
    x = inputs("Gaussian", seq)
    true = truth(x)
    cases = {
        "nothing: bf16 kernel on bf16 wire": attend(x, "cpu", None),
        "K, V: bf16 kernel on MXFP8 wire": attend(x, "cpu", "mxfp8"),
        "and Q: exact attention on rounded Q, K, V": attend(
            with_rounded_queries(x), "reference", "mxfp8"
        ),
        "and P, dO, dS: MXFP8 kernel (rounding oracle)": attend(x, "reference-mxfp8", "mxfp8"),
    }
    return [
        ["rounded", "O", "dQ", "dK", "dV"],
        *([name, *_db(decibels(got, true))] for name, got in cases.items()),
    ]


def tiles_table(seq: int) -> list[Row]:
    """Tiles against 1 x 32, everything rounded."""
    rows: list[Row] = [["inputs", "blocks", "O", "dQ", "dK", "dV"]]
    for name in ("Gaussian", "outliers", "token norms", "Student-t(3)"):
        x = inputs(name, seq)
        true = truth(x)
        for blocks, wire in (("1x32", "mxfp8-1x32"), ("32x32", "mxfp8")):
            got = decibels(attend(x, "reference-mxfp8", wire), true)
            rows.append([name, blocks, *(f"{value:.2f}" for value in got)])
    return rows


def precondition_table(seq: int) -> list[Row]:
    """SQNR of O and dQ, with K and V rounded (bf16 kernel), and with everything rounded."""
    names = ("none", "hadamard", "k-mean", "both")
    rows: list[Row] = [["inputs", "rounded", *names]]
    for name in ("Gaussian", "outliers", "biased", "token norms", "Student-t(3)"):
        x = inputs(name, seq)
        true = truth(x)
        for what, kernel in (("K, V", "cpu"), ("everything", "reference-mxfp8")):
            got = [decibels(attend(x, kernel, "mxfp8", precondition=p), true) for p in names]
            rows.append([name, f"{what}: O", *_db([out for out, *_ in got])])
            rows.append([name, f"{what}: dQ", *_db([dq for _, dq, *_ in got])])
    return rows


def probabilities_table(seq: int) -> list[Row]:
    """SQNR of dV when only P is rounded: softmax over N keys of N(0, 1) logits, 32 keys of it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(seq, 32, generator=generator)
    dout = torch.randn(seq, D, generator=generator)
    rows: list[Row] = [["keys N", "P * 256, constant scale", "scale per 32"]]
    for keys in (4096, 65536, 262144, 1048576):
        p = logits.exp() / (keys * math.exp(0.5))
        true = p.double().mT @ dout.double()
        constant = (p * 256).to(torch.float8_e4m3fn).float() / 256
        cases = [
            constant.double().mT @ dout.double(),
            rounded(p, ALONG_SEQ).double().mT @ dout.double(),
        ]
        rows.append([f"{keys:,}", *_db([sqnr(got, true) for got in cases])])
    return rows


def merged_lse_table(seq: int) -> list[Row]:
    """Gradients when lse comes from a merge with other keys, and one key that takes nearly all."""
    rows: list[Row] = [["case", "O", "dQ", "dK", "dV"]]
    x = inputs("Gaussian", seq)
    for name, moved in (
        ("lse of these keys alone", 0.0),
        ("lse + 8.3 (4,000 times the keys)", 8.3),
    ):
        got = attend(x, "reference-mxfp8", "mxfp8", lse_shift=moved)
        rows.append([name, *_db(decibels(got, truth(x, lse_shift=moved)))])
    x = inputs("sink key", seq)
    got = attend(x, "reference-mxfp8", "mxfp8")
    rows.append(["one key at logit +14 with V = 0", *_db(decibels(got, truth(x)))])
    return rows


def scale_rounding_table(seq: int) -> list[Row]:
    """Gaussian numbers in 1 x 32 blocks."""
    x = inputs("Gaussian", seq).k.float().view(seq, D)
    rows: list[Row] = [["scale", "relative error (rms)", "saturated", "SQNR dB"]]
    for rounding in (ScaleRounding.RCEIL, ScaleRounding.FLOOR):
        coded = quantise(x, ALONG_D, rounding)
        got = rounded(x, ALONG_D, rounding)
        amplitude = x.unflatten(-1, (-1, 32)) / torch.exp2(coded.scales.float() - 127).unsqueeze(-1)
        over = (amplitude.abs() > E4M3.max).float().mean().item()
        error = ((got - x).square().sum() / x.square().sum()).sqrt().item()
        rows.append([rounding.name, f"{error:.4f}", f"{over:.2%}", f"{sqnr(got, x):.2f}"])
    return rows


def leakage_table(seq: int) -> list[Row]:
    """Share of a tile's other elements whose rounding changes when one of its tokens grows."""
    rows: list[Row] = [["token times", "32x32 tile", "1x32 along d"]]
    x = inputs("Gaussian", seq).k.float().view(-1, 32, D)
    for factor in (10, 100, 1000, 10000):
        grown = x.clone()
        grown[:, 8] *= factor
        shares = []
        for shape in (TILE, ALONG_D):
            changed = rounded(grown, shape) != rounded(x, shape)
            changed[:, 8] = False
            shares.append(changed.sum().item() / (changed.numel() * 31 / 32))
        rows.append([f"{factor:,}", *(f"{share:.2%}" for share in shares)])
    return rows


def state_table(seq: int) -> list[Row]:
    """Rms relative error of merging partials in fp32, against fp64."""
    generator = torch.Generator().manual_seed(0)
    rows: list[Row] = [["partials", "state (acc, max, sum)", "running (out, lse)"]]
    for count in (2, 8, 72):
        parts = [
            (
                torch.randn(1, 256, 1, D, generator=generator),
                torch.randn(1, 1, 256, generator=generator),
            )
            for _ in range(count)
        ]
        weights = torch.softmax(torch.stack([lse for _, lse in parts]).double(), 0)
        outs = torch.stack([out for out, _ in parts]).double()
        true = (outs * weights.transpose(2, 3).unsqueeze(-1)).sum(0)
        state = State(1, 256, 1, D, device=torch.device("cpu"))
        out, lse = parts[0]
        state.merge(None, slice(0, 256), out, lse)
        for more, its_lse in parts[1:]:
            state.merge(None, slice(0, 256), more, its_lse)
            both = torch.logaddexp(lse, its_lse)
            w1, w2 = ((x - both).exp().transpose(1, 2).unsqueeze(-1) for x in (lse, its_lse))
            out, lse = out * w1 + more * w2, both
        errors = [10 ** (-sqnr(got, true) / 20) for got in (state.finalise(torch.float32)[0], out)]
        rows.append([str(count), *(f"{error:.1e}" for error in errors)])
    return rows


def ranks_table(seq: int) -> list[Row]:
    """Rms relative error of the ring against fp64, forward and backward, by number of ranks.

    The bf16 columns are PyTorch's flash kernel, which returns its partials in bf16.
    """
    x = inputs("Gaussian", seq)
    true = truth(x)
    rows: list[Row] = [["ranks", "MXFP8: O", "dQ", "dK", "dV", "bf16 wire: O", "dQ", "dK", "dV"]]
    for ranks in (1, 2, 8, 72):
        cells = []
        for kernel, wire in (("reference-mxfp8", "mxfp8"), ("cpu", None)):
            got = decibels(attend(x, kernel, wire, ranks=ranks), true)
            cells += [f"{10 ** (-value / 20):.2e}" for value in got]
        rows.append([str(ranks), *cells])
    return rows


_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def speed_table(seq: int) -> list[Row]:
    """Encoding and decoding K and V of 8 heads: GB of bf16 a CPU second."""
    rows: list[Row] = [["wire, direction", "bytes of bf16's", "encode", "decode"]]
    torch.set_num_threads(1)
    k, v = (torch.randn(1, 4 * seq, 8, D).bfloat16() for _ in range(2))
    shard = Shard((Chunk(0, 4 * seq),))
    geometry = Geometry(1, 8, D, D, k.dtype)
    for wire in (MXFP8, MXFP8_1X32):
        for direction in _DIRECTIONS:
            record = wire.record_bytes(geometry, direction)
            box = torch.empty(shard.records * record, dtype=torch.uint8)

            encode = partial(wire.encode, k, v, shard, box, direction)
            decode = partial(_decode, wire, geometry, shard, box, direction)
            rates = [2 * k.numel() * 2 / _best(f) / 1e9 for f in (encode, decode)]
            share = record / (128 * 8 * 2 * D * 2)
            rows.append([f"{wire.name}, {direction}", f"{share:.3f}", *(f"{r:.2f}" for r in rates)])
    return rows


def _decode(wire: MxWire, geometry: Geometry, shard: Shard, box: Tensor, to: Direction) -> None:
    wire.view(geometry, RecordMap.whole(shard), box, to).keys_values(0, 0, 1)


def _best(function: Callable[[], None], times: int = 9) -> float:
    """CPU seconds, which a busy machine changes less than those on the wall."""
    seconds = []
    for _ in range(times):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return min(seconds)


TABLES: dict[str, Callable[[int], list[Row]]] = {
    "rounding": rounding_table,
    "tiles": tiles_table,
    "precondition": precondition_table,
    "probabilities": probabilities_table,
    "merged-lse": merged_lse_table,
    "scale-rounding": scale_rounding_table,
    "leakage": leakage_table,
    "state": state_table,
    "ranks": ranks_table,
    "speed": speed_table,
}


def markdown(rows: Sequence[Row]) -> str:
    head, *body = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def provenance(seq: int, name: str) -> str:
    """Command, machine and date, for below a table."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = re.search(r"model name\s*: (.*)", info.read_text())
        cpu = found.group(1) if found else cpu
    return (
        f"`python -m ringfa4.launch.numerics_tables --only {name} --seq {seq}`, "
        f"{cpu}, torch {torch.__version__}, {datetime.date.today()}"
    )


def written(page: str, name: str, text: str) -> str:
    """``page`` with ``text`` between ``<!-- table: name -->`` and ``<!-- end -->``."""
    pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    page, count = pattern.subn(lambda m: f"{m[1]}{text}\n{m[2]}", page)
    if count != 1:
        raise ValueError(f"the page has {count} places for table {name!r}, not one")
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=TABLES, action="append", help="a table (repeatable)")
    parser.add_argument("--seq", type=int, default=4096, help="tokens (default: 4096)")
    parser.add_argument("--write", type=Path, help="page whose tables are replaced")
    options = parser.parse_args(arguments)
    for name in options.only or TABLES:
        text = markdown(TABLES[name](options.seq)) + "\n\n" + provenance(options.seq, name)
        print(f"{name}\n\n{text}\n", flush=True)
        if options.write:
            options.write.write_text(written(options.write.read_text(), name, text))


if __name__ == "__main__":
    main()
