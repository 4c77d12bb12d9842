"""Sampled rows of a ring's results against fp64 over all keys, by the definition.

    query rows i:   P_ij = exp(scale q_i.k_j - lse_i),  out_i = sum_j P_ij v_j,
                    dq_i = scale sum_j P_ij (dout_i.v_j - delta_i) k_j,  delta_i = out_i.dout_i
    key rows j:     dv_j = sum_i P_ij dout_i,  dk_j = scale sum_i P_ij (dout_i.v_j - delta_i) q_i

Each rank adds up its own original K and V (or its own queries); sums and maxima over ranks go
through :mod:`ringfa4.launch.peers`. So neither ring, plan, wire, transport nor kernel is trusted:
the mask is the membership of (i, j) in its bands. Key rows take lse and out from the ring, because
those of *all* queries are needed; their rows are what the first check has sampled.

Tolerance. Write u for half an ulp of the inputs' dtype, w for one of the dtype that sums are kept
in, and x for one of the block format on the wire (0 for plain wires). The terms t of a sum (P_ij
v_j, or scale dS_ij k_j, ...) are rounded independently, as operands of a matrix product and as
partial results; their P (and dS) carries the errors of its logit (and of dout.v); the result is
rounded as a whole:

    sigma^2 = sum t^2 (2 u^2 + 2 x^2 + (w a)^2 + var S_ij)  +  result^2 (2 u^2 + w^2 n / 128)
              +  what out's error adds to delta  +  the smallest subnormal's share
    var S_ij = 2 x^2 scale^2 sum_d q_id^2 k_jd^2           both operands rounded; rotated ones mixed
    lse:       w^2 (2 a^2 + n / 128)  +  sum P^2 (x^2 + var S)  +  var S at the mean key
               +  the exponential's own error

a bounds |scale q.k| + |lse| + 1 (Cauchy-Schwarz), n is the number of terms, kept in partial sums
of at least 128. u is the largest rounding error where about 0.4 u is its root mean square, so sigma
is generous; hence errors in sigmas may have a root mean square of RMS_LIMIT over a tensor's
elements, and none may pass WORST_LIMIT. Independence is the assumption: V, K or Q made so
that whole partial results cancel can fail a sound kernel. Inputs that are not finite are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ringfa4.launch.peers import Peers
from ringfa4.launch.samples import gather_rows, membership, sample_positions
from ringfa4.mask import Mask
from ringfa4.ops import positions
from ringfa4.shard import Shard, Sharding

RMS_LIMIT = 1.0
WORST_LIMIT = 6.0

FAST_EXP = 1e-4
"""Relative error of the exponential that kernels take for 16-bit inputs, where P is rounded far
more coarsely: 5.9e-5 measured in PyTorch's CPU kernel, 8.8e-5 for a polynomial of degree three.
"""

BLOCK = 4096
"""Local rows taken at a time: 32 samples of 8 heads are 8 MB of fp64 logits."""


@dataclass(frozen=True)
class Tensors:
    """One rank's inputs and results, (b, s, h, d) and lse (b, h, s); None where not computed."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsink: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """How one tensor's sampled rows compare; ``rms`` and ``worst`` are errors in sigmas."""

    name: str
    rows: int
    sqnr_db: float
    max_error: float
    rms: float
    worst: float
    worst_position: int
    passed: bool


# ---- fp64 ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rounding:
    """Half an ulp: ``u`` of the inputs' dtype, ``w`` of its sums, ``x`` of the wire's blocks.

    ``tiny``: half the least value of the dtype.
    """

    u: float
    w: float
    x: float
    tiny: float
    exp: float

    @classmethod
    def of(cls, dtype: torch.dtype, x: float) -> _Rounding:
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        info = torch.finfo(dtype)
        tiny = info.smallest_normal * info.eps / 2
        exp = FAST_EXP if dtype.itemsize == 2 else 0.0
        return cls(info.eps / 2, torch.finfo(sums).eps / 2, x, tiny, exp)

    def terms(self, a: Tensor) -> Tensor:
        """Variance of a rounded term, relative to its square."""
        return 2 * self.u**2 + 2 * self.x**2 + (self.w * a) ** 2

    def result(self, n: Tensor) -> Tensor:
        """Variance of a rounded sum of n terms, relative to its square."""
        return 2 * self.u**2 + self.w**2 * n / 128


def _grouped(x: Tensor, heads_kv: int) -> Tensor:
    """(b, n, h, d) -> fp64 (b, heads_kv, group, n, d)."""
    heads: Tensor = x.to(torch.float64).unflatten(2, (heads_kv, -1))
    return heads.permute(0, 2, 3, 1, 4)


def _ungrouped(x: Tensor) -> Tensor:
    """(b, heads_kv, group, n, d) -> (b, n, h, d)."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _norm(x: Tensor) -> Tensor:
    """Largest Euclidean norm of a row of (b, s, h, d), a scalar; 0 without rows."""
    largest = torch.zeros((), dtype=torch.float64, device=x.device)
    for block in x.split(BLOCK, dim=1):
        if block.numel():
            largest = torch.maximum(largest, block.float().norm(dim=-1).amax().double())
    return largest


class Checker:
    """Checks of one rank; every method is collective. ``scale`` and ``sink`` as in the call.

    ``blocks``: half an ulp of the block format that operands are rounded to, 0 for none;
    ``rotated``: Q and K are rounded after a rotation.
    """

    def __init__(
        self,
        peers: Peers,
        mask: Mask,
        shards: tuple[Sharding, Sharding],
        tensors: Tensors,
        *,
        scale: float,
        sink: Tensor | None = None,
        rows: int = 32,
        blocks: float = 0.0,
        rotated: bool = False,
    ) -> None:
        self.peers, self.mask, self.t = peers, mask, tensors
        self.q_shard, self.k_shard = (s.shards[peers.rank] for s in shards)
        self.q_rows, self.k_rows = (sample_positions(s, rows) for s in shards)
        self.scale = scale
        self.sink = None if sink is None else sink.to(torch.float64)
        self.heads_kv = tensors.k.shape[2]
        self.rounding, self.rotated = _Rounding.of(tensors.q.dtype, blocks), rotated
        self.q_norm, self.k_norm, self.v_norm = (
            peers.max(_norm(x)) for x in (tensors.q, tensors.k, tensors.v)
        )

    def run(self) -> list[Verdict]:
        """A verdict for each result there is."""
        verdicts = self.query_rows()
        if self.t.dk is not None:
            verdicts += self.key_rows()
        if self.t.dsink is not None:
            verdicts.append(self.sink_gradient())
        return verdicts

    def _variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Of x.y for rows x (.., n, d), y (.., m, d) that are rounded to blocks; (.., n, m)."""
        return 2 * self.rounding.x**2 * (x**2 @ y.mT**2)

    def _logit_variance(self, q: Tensor, k: Tensor) -> Tensor:
        """Of scale * q.k, as :meth:`_variance`; a rotation spreads each vector over all of d."""
        variance = self._variance(q, k)
        if self.rotated:
            even = (x.norm(dim=-1, keepdim=True).expand_as(x) / x.shape[-1] ** 0.5 for x in (q, k))
            variance = variance + self._variance(*even)
        return self.scale**2 * variance

    def _key_blocks(self, q: Tensor, i: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """(logits, allowed, k, v) of sampled queries against this rank's keys, block by block."""
        j = positions(self.k_shard, q.device)
        for a in range(0, len(j), BLOCK):
            k, v = (_grouped(x[:, a : a + BLOCK], self.heads_kv) for x in (self.t.k, self.t.v))
            seen = membership(self.mask, i, j[a : a + BLOCK])[:, None, None]
            logits = (self.scale * q @ k.mT).masked_fill(~seen, -math.inf)
            yield logits, seen.to(torch.float64), k, v

    def query_rows(self) -> list[Verdict]:
        """out, lse and dq of the sampled queries."""
        peers, t, r = self.peers, self.t, self.rounding
        q = _grouped(gather_rows(peers, self.q_shard, self.q_rows, t.q), self.heads_kv)
        i = torch.tensor(self.q_rows, dtype=torch.int64, device=q.device)

        # Softmax of this rank's keys: (max, sum) and sums of p v, (p v)^2, ..., then merged.
        top = q.new_full(q.shape[:-1], -math.inf)
        total, count, p_squares, shaken = (torch.zeros_like(top) for _ in range(4))
        acc, squares, moved, floor = (q.new_zeros(*top.shape, t.v.shape[-1]) for _ in range(4))
        mean_k = torch.zeros_like(q)
        for logits, seen, k, v in self._key_blocks(q, i):
            new = torch.maximum(top, logits.amax(-1))
            safe = new.masked_fill(new == -math.inf, 0)
            keep, p = torch.exp(top - safe), torch.exp(logits - safe.unsqueeze(-1))
            p2, shake = p**2, p**2 * self._logit_variance(q, k)
            top, total, count = new, total * keep + p.sum(-1), count + seen.sum(-1)
            p_squares, shaken = p_squares * keep**2 + p2.sum(-1), shaken * keep**2 + shake.sum(-1)
            keep = keep.unsqueeze(-1)
            acc, mean_k = acc * keep + p @ v, mean_k * keep + p @ k
            squares = squares * keep**2 + p2 @ v**2
            moved, floor = moved * keep**2 + shake @ v**2, floor + seen @ v**2
        best = peers.max(top)
        safe = best.masked_fill(best == -math.inf, 0)
        keep = torch.exp(top - safe)
        total, count = peers.sum(total * keep), peers.sum(count)
        lse = safe + torch.log(total)  # -inf where no key is seen
        if self.sink is not None:
            lse = torch.logaddexp(lse, self.sink.view(self.heads_kv, -1, 1))
        share = torch.exp(safe - lse).nan_to_num(posinf=0.0)  # 1 / sum
        p_squares, shaken = (peers.sum(x * keep**2) * share**2 for x in (p_squares, shaken))
        keep, share = keep.unsqueeze(-1), share.unsqueeze(-1)
        out, mean_k = (peers.sum(x * keep) * share for x in (acc, mean_k))
        squares, moved = (peers.sum(x * keep**2) * share**2 for x in (squares, moved))
        floor = peers.sum(floor) * share**2

        a = self.scale * q.norm(dim=-1) * self.k_norm + 1
        a = a + lse.masked_fill(lse == -math.inf, 0).abs()
        # One error of q moves all logits of a row: lse by what it moves the mean key's.
        together = self._logit_variance(q.unsqueeze(-2), mean_k.unsqueeze(-2)).flatten(-3)
        lse_variance = r.exp**2 + r.w**2 * (2 * a**2 + count / 128)
        lse_variance = lse_variance + r.x**2 * p_squares + shaken + together
        n, a = count.unsqueeze(-1), a.unsqueeze(-1)
        moved = 2 * (moved + out**2 * shaken.unsqueeze(-1))  # (v - out)^2 <= 2 v^2 + 2 out^2
        out_variance = r.terms(a) * squares + moved + r.result(n) * out**2 + r.tiny**2 * floor
        got_lse = gather_rows(peers, self.q_shard, self.q_rows, t.lse.transpose(1, 2).unsqueeze(-1))
        want_lse, lse_variance = (_ungrouped(x.unsqueeze(-1)) for x in (lse, lse_variance))
        verdicts = [
            self._judge("out", self.q_rows, t.out, self.q_shard, _ungrouped(out), out_variance),
            judge("lse", self.q_rows, got_lse, want_lse, lse_variance),
        ]
        if t.dq is None:
            return verdicts
        assert t.dout is not None
        dout = _grouped(gather_rows(peers, self.q_shard, self.q_rows, t.dout), self.heads_kv)
        delta = (out * dout).sum(-1, keepdim=True)
        live = lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)
        sums = [q.new_zeros(q.shape) for _ in range(6)]
        for logits, seen, k, v in self._key_blocks(q, i):
            p = torch.exp(logits - live)
            ds = self.scale * p * (dout @ v.mT - delta)
            shake = self._ds_variance(p, ds, self._logit_variance(q, k), self._variance(dout, v))
            parts = (ds @ k, ds**2 @ k**2, shake @ k**2, p @ k, p**2 @ k**2, seen @ k**2)
            sums = [total + part for total, part in zip(sums, parts, strict=True)]
        dq, squares, moved, p_k, p_squares, floor = (peers.sum(x) for x in sums)
        b = dout.norm(dim=-1, keepdim=True) * self.v_norm
        delta_variance = (dout**2 * (out_variance + r.u**2 * out**2)).sum(-1, keepdim=True)
        variance = (
            r.terms(a) * squares
            + moved
            + r.result(n) * dq**2
            + self.scale**2
            * (delta_variance * p_k**2 + (r.w * b) ** 2 * p_squares + r.tiny**2 * floor)
        )
        judged = self._judge("dq", self.q_rows, t.dq, self.q_shard, _ungrouped(dq), variance)
        return [*verdicts, judged]

    def _ds_variance(self, p: Tensor, ds: Tensor, logit: Tensor, dp: Tensor) -> Tensor:
        """Of dS = scale P (dP - delta), from the variances of the logit and of dP."""
        return ds**2 * logit + (self.scale * p) ** 2 * dp

    def _query_blocks(self) -> Iterator[tuple[Tensor, ...]]:
        """(positions, q, dout, lse, delta) of this rank's queries, block by block, grouped fp64."""
        t = self.t
        assert t.dout is not None
        i = positions(self.q_shard, t.q.device)
        for a in range(0, len(i), BLOCK):
            q, out, dout = (
                _grouped(x[:, a : a + BLOCK], self.heads_kv) for x in (t.q, t.out, t.dout)
            )
            lse = t.lse[:, :, a : a + BLOCK].to(torch.float64).unflatten(1, (self.heads_kv, -1))
            yield i[a : a + BLOCK], q, dout, lse, (out * dout).sum(-1)

    def key_rows(self) -> list[Verdict]:
        """dk and dv of the sampled keys, from the ring's lse and out of all queries."""
        peers, t, r = self.peers, self.t, self.rounding
        assert t.dout is not None and t.dk is not None and t.dv is not None
        k, v = (
            _grouped(gather_rows(peers, self.k_shard, self.k_rows, x), self.heads_kv)
            for x in (t.k, t.v)
        )
        j = torch.tensor(self.k_rows, dtype=torch.int64, device=k.device)
        out_norm, dout_norm = peers.max(_norm(t.out)), peers.max(_norm(t.dout))
        dk_sums = [k.new_zeros(k[:, :, 0].shape) for _ in range(5)]
        dv_sums = [v.new_zeros(v[:, :, 0].shape) for _ in range(4)]
        count, largest = k.new_zeros(k.shape[0], k.shape[3], 1), k.new_zeros(())
        for i, q, dout, lse, delta in self._query_blocks():
            seen = membership(self.mask, i, j).mT[:, None, None]  # (b or 1, 1, 1, sampled, queries)
            dead = lse == -math.inf
            logits = (self.scale * k @ q.mT).masked_fill(~seen, -math.inf)
            p = torch.exp(logits - lse.masked_fill(dead, math.inf).unsqueeze(-2))
            ds = self.scale * p * (v @ dout.mT - delta.unsqueeze(-2))
            weight = seen.to(torch.float64)
            logit = self._logit_variance(k, q)
            shake = self._ds_variance(p, ds, logit, self._variance(v, dout))
            dk_parts = (ds @ q, ds**2 @ q**2, shake @ q**2, p**2 @ q**2, weight @ q**2)
            dv_parts = (p @ dout, p**2 @ dout**2, (p**2 * logit) @ dout**2, weight @ dout**2)
            dk_sums = [s + x.sum(2) for s, x in zip(dk_sums, dk_parts, strict=True)]
            dv_sums = [s + x.sum(2) for s, x in zip(dv_sums, dv_parts, strict=True)]
            count += weight.sum(-1)[:, 0, 0].unsqueeze(-1) * q.shape[2]
            largest = torch.maximum(largest, lse.masked_fill(dead, 0).abs().amax())
        dk, dk_squares, dk_moved, p_squares, dk_floor = (peers.sum(x) for x in dk_sums)
        dv, dv_squares, dv_moved, dv_floor = (peers.sum(x) for x in dv_sums)
        n = peers.sum(count).unsqueeze(1)
        a = self.scale * self.q_norm * k[:, :, 0].norm(dim=-1, keepdim=True)
        a = a + peers.max(largest) + 1
        b = dout_norm * (v[:, :, 0].norm(dim=-1, keepdim=True) + out_norm)
        dv_variance = (
            r.terms(a) * dv_squares + dv_moved + r.result(n) * dv**2 + r.tiny**2 * dv_floor
        )
        dk_variance = (
            r.terms(a) * dk_squares
            + dk_moved
            + r.result(n) * dk**2
            + self.scale**2 * ((r.w * b) ** 2 * p_squares + r.tiny**2 * dk_floor)
        )
        rows, shard = self.k_rows, self.k_shard
        return [
            self._judge("dk", rows, t.dk, shard, dk.transpose(1, 2), dk_variance.unsqueeze(2)),
            self._judge("dv", rows, t.dv, shard, dv.transpose(1, 2), dv_variance.unsqueeze(2)),
        ]

    def sink_gradient(self) -> Verdict:
        """dsink = -sum over all queries of exp(sink - lse) delta, from the ring's lse and out."""
        peers, t, r = self.peers, self.t, self.rounding
        assert self.sink is not None and t.dsink is not None and t.dout is not None
        sink = self.sink.view(self.heads_kv, -1, 1)
        result = squares = weights = torch.zeros_like(self.sink)
        for _, _, _, lse, delta in self._query_blocks():
            p = torch.exp(sink - lse)
            result = result - (p * delta).sum((0, -1)).flatten()
            squares = squares + ((p * delta) ** 2).sum((0, -1)).flatten()
            weights = weights + (p**2).sum((0, -1)).flatten()
        result, squares, weights = peers.sum(result), peers.sum(squares), peers.sum(weights)
        a = self.sink.abs() + self.scale * self.q_norm * self.k_norm + math.log(self.mask.seq_k + 1)
        b = peers.max(_norm(t.out)) * peers.max(_norm(t.dout))
        n = torch.tensor(float(self.mask.seq_q * t.q.shape[0]))
        variance = (
            (r.w * a) ** 2 * squares + (r.w * b) ** 2 * weights + r.w**2 * n / 128 * result**2
        )
        shape = (1, 1, -1, 1)
        got = t.dsink.to(torch.float64).view(shape)
        return judge("dsink", [0], got, result.view(shape), variance.view(shape))

    def _judge(
        self,
        name: str,
        rows: list[int],
        local: Tensor,
        shard: Shard,
        want: Tensor,
        variance: Tensor,
    ) -> Verdict:
        got = gather_rows(self.peers, shard, rows, local)
        return judge(name, rows, got, want, _ungrouped(variance))


def judge(name: str, rows: list[int], got: Tensor, want: Tensor, variance: Tensor) -> Verdict:
    """Compare (b, n, h, d) with its reference, given the variance that rounding explains.

    Values that are not finite must be the same: NaN where NaN is due, -inf where -inf is.
    """
    same = (got == want) | (got.isnan() & want.isnan())
    error = torch.where(same, 0.0, (got - want).abs()).nan_to_num(nan=math.inf)
    finite = want.isfinite()
    sigmas = torch.where(error == 0, 0.0, error / variance.sqrt()).flatten()
    sigmas = sigmas.nan_to_num(nan=math.inf)  # where the truth is not finite and we are
    signal, noise = (torch.where(finite, x, 0.0).square().sum().item() for x in (want, error))
    rms = sigmas.square().mean().sqrt().item() if len(sigmas) else 0.0
    at = int(sigmas.argmax()) if len(sigmas) else 0
    worst = sigmas[at].item() if len(sigmas) else 0.0
    return Verdict(
        name=name,
        rows=len(rows),
        sqnr_db=_decibel(signal, noise),
        max_error=error.max().item() if len(sigmas) else 0.0,
        rms=rms,
        worst=worst,
        worst_position=rows[at // math.prod(got.shape[2:]) % len(rows)] if len(sigmas) else 0,
        passed=rms <= RMS_LIMIT and worst <= WORST_LIMIT,
    )


def _decibel(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and noise < math.inf else -math.inf
