"""The rounding oracle keeps the kernel contract on both MXFP8 wires, judged as MXFP8 kernels are;
and it reads the wire's bytes rather than rounding K and V itself.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_contract import Case, KernelContract
from test_kernel_double import LowPrecisionContract

from ringfa4 import mask as masks
from ringfa4.kernels.interface import BlockKernel, KernelSpec
from ringfa4.kernels.reference_mxfp8 import ReferenceMxfp8Kernel
from ringfa4.kernels.registry import load_kernel
from ringfa4.mx.formats import ALONG_D, ALONG_SEQ
from ringfa4.mx.quantise import rounded
from ringfa4.mx.wire import MxShard
from ringfa4.wire import wire_format


class OracleContract(LowPrecisionContract):
    heads_and_dims = ((8, 2, 192, 128), (4, 1, 32, 32), (2, 2, 64, 96), (1, 1, 256, 256))
    dtypes = (torch.float32, torch.bfloat16)

    def make(self) -> BlockKernel:
        return load_kernel("reference-mxfp8")


class TestTiles(OracleContract):
    wire = "mxfp8"


class TestOneBy32(OracleContract):
    wire = "mxfp8-1x32"


class TestInteger(OracleContract):
    wire = "mxfp8"

    def make(self) -> BlockKernel:
        return ReferenceMxfp8Kernel(integer=True)

    def test_how_far_the_reference_lags_changes_nothing(self) -> None:
        """Tiles of keys in another order leave other references behind; what is left is the order
        of fp32 sums.
        """
        case = self.case(masks.full(100, 512), chunks=1)
        keys = torch.arange(512).view(4, 128).flip(0).flatten()  # whole tiles: the blocks stay
        flipped = replace(case, k=case.k[:, keys], v=case.v[:, keys])
        for a, b in zip(self.forward(case), self.forward(flipped), strict=True):
            torch.testing.assert_close(a, b)


def spec(**changes: object) -> KernelSpec:
    base = KernelSpec("cpu", None, torch.bfloat16, "mxfp8", 4, 2, 64, 64, frozenset(), True)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_other_wires_are_refused_by_name():
    kernel = load_kernel("reference-mxfp8")
    assert kernel.supports(spec()) is None
    assert "not 'bf16'" in (kernel.supports(spec(wire="bf16")) or "")


def a_case(wire: str) -> Case:
    contract = KernelContract()
    contract.wire = wire
    return contract.case(masks.causal(150), dtype=torch.bfloat16)


@pytest.mark.parametrize("wire", ["mxfp8", "mxfp8-1x32"])
def test_k_and_v_are_the_wires(wire):
    """A byte flipped in the payload, or a scale, changes the result: nothing is rounded anew."""
    case, kernel = a_case(wire), load_kernel("reference-mxfp8")
    form = wire_format(wire, case.k.dtype)

    def out(change: int | None) -> torch.Tensor:
        encoded = case.encoded()
        assert isinstance(encoded, MxShard)
        layout = form.layout(case.geometry, "forward")
        if change is not None:
            operand = layout.operands[change % 2]
            if change < 2:
                layout.payload(operand, encoded.records)[0, 0, 0, 0, 0] ^= 0x80
            else:
                layout.scales(operand, encoded.records)[0, 0, 0, 0] += 1
        state = case.state()
        kernel.forward(kernel.prepare(case.q, case.q_shard), encoded, case.tasks, case.scale, state)
        return state.finalise(torch.float32)[0]

    plain = out(None)
    assert torch.equal(plain, out(None))
    for change in range(4):
        assert not torch.equal(plain, out(change)), change


def test_it_rounds_where_it_says():
    """One row of queries and one block of keys, written out: forward, then backward."""
    g = torch.Generator().manual_seed(0)
    contract = KernelContract()
    contract.wire = "mxfp8-1x32"
    case = contract.case(masks.full(32, 32), heads=(1, 1), dims=(32, 32), batch=1, chunks=1)
    lse = torch.randn(1, 1, 32, generator=g) + 6
    q, k, v, dout = (x[0, :, 0] for x in (case.q, case.k, case.v, case.dout))

    def d(x: torch.Tensor) -> torch.Tensor:
        return rounded(x, ALONG_D)

    def s(x: torch.Tensor) -> torch.Tensor:
        return rounded(x, ALONG_SEQ)

    contract.make = lambda: load_kernel("reference-mxfp8")  # type: ignore[method-assign]
    logits = case.scale * (d(q) @ d(k).T)
    p = torch.exp(logits - logits.amax(-1, keepdim=True))
    out, got_lse = contract.forward(case)
    torch.testing.assert_close(out[0, :, 0], d(p) @ s(v) / p.sum(-1, keepdim=True))
    torch.testing.assert_close(got_lse[0, 0], torch.logsumexp(logits, -1))

    p = torch.exp(logits - lse[0, 0].unsqueeze(-1))
    delta = (out[0, :, 0] * dout).sum(-1, keepdim=True)
    ds = p * (d(dout) @ d(v).T - delta)
    dq, dk, dv = contract.backward(case, out, lse)
    torch.testing.assert_close(dv[0, :, 0], s(p).T @ s(dout))
    torch.testing.assert_close(dk[0, :, 0], case.scale * (s(ds).T @ s(q)))
    torch.testing.assert_close(dq[0, :, 0], case.scale * (d(ds) @ s(k)))
