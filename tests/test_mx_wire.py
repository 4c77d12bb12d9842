"""MXFP8 records: their byte map, their size, what depends on what, and what padding may hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringfa4.mask import causal, documents, stack
from ringfa4.mx.formats import ALONG_D, ALONG_SEQ, E4M3, E8M0, TILE
from ringfa4.mx.layout import to_atoms
from ringfa4.mx.quantise import dequantise, quantise, rounded
from ringfa4.mx.wire import MXFP8, MXFP8_1X32, MxShard, MxWire
from ringfa4.plan import RecordRange
from ringfa4.shard import RECORD, Chunk, Shard, contiguous
from ringfa4.wire import Direction, Geometry, RecordMap, wire_format

WIRES = [MXFP8, MXFP8_1X32]
DIRECTIONS: list[Direction] = ["forward", "backward"]
every_wire = pytest.mark.parametrize("wire", WIRES, ids=lambda w: w.name)
both_directions = pytest.mark.parametrize("direction", DIRECTIONS)


def inputs(
    tokens: int, *, batch: int = 2, heads: int = 2, dk: int = 64, dv: int = 32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(batch, tokens, heads, d, generator=g) for d in (dk, dv))
    return k.bfloat16(), v.bfloat16()


def geometry(k: Tensor, v: Tensor) -> Geometry:
    return Geometry(k.shape[0], k.shape[2], k.shape[3], v.shape[3], k.dtype)


def encode(
    wire: MxWire, k: Tensor, v: Tensor, shard: Shard, direction: Direction, stale: int = 0xFF
) -> Tensor:
    """The owner's outbox, which held ``stale`` bytes before."""
    size = shard.records * wire.record_bytes(geometry(k, v), direction)
    out = torch.full((size,), stale, dtype=torch.uint8)
    wire.encode(k, v, shard, out, direction)
    return out


def opened(
    wire: MxWire, k: Tensor, v: Tensor, shard: Shard, out: Tensor, direction: Direction
) -> MxShard:
    return wire.view(geometry(k, v), RecordMap.whole(shard), out, direction)


# ---- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dk", "dv"), [(64, 64), (128, 128), (192, 128), (256, 256), (96, 32)])
def test_bytes_of_a_record(dk, dv):
    """Per batch row and head: 128 (dk + dv), and 512 per started 128 of d and scale set."""
    g = Geometry(2, 3, dk, dv, torch.bfloat16)
    atoms = {d: -(-d // 128) * 512 for d in (dk, dv)}
    forward = 128 * (dk + dv) + atoms[dk] + atoms[dv]
    backward = forward + atoms[dk]
    assert MXFP8.record_bytes(g, "forward") == MXFP8_1X32.record_bytes(g, "forward") == 6 * forward
    assert MXFP8.record_bytes(g, "backward") == 6 * backward
    assert MXFP8_1X32.record_bytes(g, "backward") == 6 * (backward + 128 * dk)


def test_half_the_bytes_of_bf16_both_ways():
    """8 bits an element instead of 16, and d = 128 adds one scale per 32 elements and set."""
    g = Geometry(1, 8, 128, 128, torch.bfloat16)
    bf16 = wire_format("bf16", torch.bfloat16).record_bytes(g, "forward")
    assert MXFP8.record_bytes(g, "forward") / bf16 == (1 + 1 / 32) / 2
    assert MXFP8.record_bytes(g, "backward") / bf16 == (1 + 1.5 / 32) / 2


@every_wire
def test_refusals_name_what_was_asked(wire):
    assert wire.supports(Geometry(1, 1, 64, 96, torch.float16)) is None
    assert "dk=40" in (wire.supports(Geometry(1, 1, 40, 64, torch.bfloat16)) or "")
    assert "float64" in (wire.supports(Geometry(1, 1, 64, 64, torch.float64)) or "")


def test_wires_are_found_by_name():
    assert wire_format("mxfp8", torch.bfloat16) is MXFP8
    assert wire_format("mxfp8-1x32", torch.bfloat16) is MXFP8_1X32
    with pytest.raises(ValueError, match=r"unknown wire 'mxfp4'.*mxfp8"):
        wire_format("mxfp4", torch.bfloat16)


# ---- the byte map -------------------------------------------------------------------------------


@every_wire
@both_directions
def test_bytes_lie_where_the_table_says(wire, direction):
    """The whole record rebuilt from the module's table, section after section."""
    k, v = inputs(2 * RECORD, dk=192, dv=64)
    out = encode(wire, k, v, Shard((Chunk(0, 2 * RECORD),)), direction)
    size = wire.record_bytes(geometry(k, v), direction)
    shape_d, shape_seq = (TILE, TILE) if wire.tiles else (ALONG_D, ALONG_SEQ)

    def scales(x: Tensor, along: str) -> Tensor:
        """(rows, blocks) of an operand (128, d), one by one."""
        shape = shape_d if along == "d" else shape_seq
        linear, (tokens, d) = quantise(x, shape).scales.tolist(), x.shape
        grid = range(tokens), range(d)
        full = torch.tensor(
            [[linear[i // shape.rows][j // shape.cols] for j in grid[1]] for i in grid[0]]
        )
        return full[:, ::32] if along == "d" else full[::32].mT

    for record in range(2):
        rows = slice(record * RECORD, (record + 1) * RECORD)
        heads = [(b, h) for b in range(2) for h in range(2)]
        ks, vs = ([x[b, rows, h] for b, h in heads] for x in (k, v))
        k_d = [quantise(x, shape_d).payload for x in ks]
        sections: list[list[Tensor]]
        if direction == "forward":
            sections = [k_d, [quantise(x, shape_seq).payload.mT for x in vs]]
            sets = [(ks, "d"), (vs, "seq")]
        else:
            second = [] if wire.tiles else [[quantise(x, shape_seq).payload.mT for x in ks]]
            sections = [k_d, *second, [quantise(x, shape_d).payload for x in vs]]
            sets = [(ks, "d"), (ks, "seq"), (vs, "d")]
        sections += [[to_atoms(scales(x, along)) for x in xs] for xs, along in sets]
        expected = torch.cat([part.flatten() for section in sections for part in section])
        assert torch.equal(out[record * size : (record + 1) * size], expected.to(torch.uint8))


@every_wire
@both_directions
@given(data=st.data())
def test_any_records_are_one_contiguous_copy(wire, direction, data):
    """A reader gets spans of the outbox, packed, and decodes from them what the owner holds."""
    counts = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    shard = Shard(tuple(Chunk(1000 * i, n) for i, n in enumerate(counts)))
    ranges = []
    for c, chunk in enumerate(shard.chunks):
        start = data.draw(st.integers(0, chunk.records - 1))
        stop = data.draw(st.integers(start, chunk.records))
        if stop > start:
            ranges.append(RecordRange(c, start, stop))
    k, v = inputs(len(shard), batch=1, heads=1, dk=32, dv=64)
    out = encode(wire, k, v, shard, direction)
    whole = opened(wire, k, v, shard, out, direction)
    part = RecordMap(shard, tuple(ranges))
    size = wire.record_bytes(geometry(k, v), direction)
    spans = part.spans(size)
    assert len(spans) <= len(ranges)
    fetched = torch.cat([out[a : a + n] for a, n in spans] + [out.new_full((64,), 0xFF)])
    view = wire.view(geometry(k, v), part, fetched, direction)
    for chunk, start, stop in part.tokens():
        for mine, theirs in zip(
            view.keys_values(chunk, start, stop), whole.keys_values(chunk, start, stop), strict=True
        ):
            assert torch.equal(mine, theirs)


# ---- what is decoded ----------------------------------------------------------------------------


@every_wire
@both_directions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_decoded_values_are_the_rounded_inputs(wire, direction, dtype):
    first = 2 * RECORD
    k, v = (x.to(dtype) for x in inputs(first + 40))
    shard = Shard((Chunk(0, first), Chunk(500, 40)))
    view = opened(wire, k, v, shard, encode(wire, k, v, shard, direction), direction)

    def due(x: Tensor, along: str) -> Tensor:
        shape = wire.shape(along)
        by_head = x.float().transpose(1, 2)
        parts = [rounded(piece, shape) for piece in by_head.split([first, 40], 2)]
        return torch.cat(parts, 2).transpose(1, 2)

    got = [view.keys_values(0, 0, first), view.keys_values(1, 3, 40)]
    along_v = "seq" if direction == "forward" else "d"
    for pieces, x, along in ((0, k, "d"), (1, v, along_v)):
        exact = due(x, along)
        assert torch.equal(got[0][pieces].float(), exact[:, :first])
        assert torch.equal(got[1][pieces].float(), exact[:, first + 3 :])
        assert got[0][pieces].dtype == dtype
    if direction == "backward":
        for_dq = view.operand("k", "seq", 0, 0, first, torch.float32)
        assert torch.equal(for_dq, due(k, "seq")[:, :first])


@both_directions
def test_one_payload_serves_both_orientations_of_a_tile(direction):
    """Not the same bytes in memory for V (transposed in forward), the same numbers everywhere."""
    k, v = inputs(RECORD)
    shard = Shard((Chunk(0, RECORD),))
    view = opened(MXFP8, k, v, shard, encode(MXFP8, k, v, shard, direction), direction)
    other: Direction = "backward" if direction == "forward" else "forward"
    again = opened(MXFP8, k, v, shard, encode(MXFP8, k, v, shard, other), other)
    for a, b in zip(view.keys_values(0, 0, RECORD), again.keys_values(0, 0, RECORD), strict=True):
        assert torch.equal(a, b)


@every_wire
def test_strides_do_not_matter_and_input_is_left_alone(wire):
    k, v = inputs(200)
    shard = Shard((Chunk(0, 200),))
    strange = [x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for x in (k, v)]
    copies = [x.clone() for x in strange]
    out = encode(wire, k, v, shard, "forward")
    assert torch.equal(out, encode(wire, *strange, shard, "forward"))
    assert all(torch.equal(a, b) for a, b in zip(strange, copies, strict=True))


def test_a_shard_is_decoded_once():
    k, v = inputs(2 * RECORD)
    shard = Shard((Chunk(0, 2 * RECORD),))
    view = opened(MXFP8, k, v, shard, encode(MXFP8, k, v, shard, "forward"), "forward")
    first = view.keys_values(0, 0, RECORD)
    second = view.keys_values(0, RECORD, 2 * RECORD)
    for a, b in zip(first, second, strict=True):
        assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


# ---- padding ------------------------------------------------------------------------------------


@every_wire
@both_directions
@pytest.mark.parametrize("tokens", [1, 31, 33, 129])
def test_padding_is_zero_and_neutral_whatever_the_outbox_held(wire, direction, tokens):
    k, v = inputs(tokens)
    shard = Shard((Chunk(0, tokens),))
    zero, stale = (encode(wire, k, v, shard, direction, stale) for stale in (0, 0xFF))
    assert torch.equal(zero, stale)
    layout = wire.layout(geometry(k, v), direction)
    last = stale.view(-1, layout.nbytes)[-1:]
    used = tokens - (shard.records - 1) * RECORD
    for operand in layout.operands:
        assert not layout.payload(operand, last)[..., used:, :].any()
        pads = layout.scales(operand, last)
        assert (pads != E8M0.nan).all()
        beyond = -(-used // 32)  # blocks of 32 tokens with a token in them
        blocks = torch.full((RECORD, operand.d // 32), E8M0.neutral, dtype=torch.uint8)
        if operand.along == "d":
            blocks[: used if not wire.tiles else beyond * 32] = 0
        else:
            blocks = torch.full((operand.d, 4), E8M0.neutral, dtype=torch.uint8)
            blocks[:, :beyond] = 0
        neutral = to_atoms(blocks) == E8M0.neutral
        assert (pads[..., neutral] == E8M0.neutral).all()


@every_wire
@pytest.mark.parametrize("tokens", [7984, 129])
def test_case_25_stray_bytes_in_the_padding_reach_nothing(wire, tokens):
    """TransformerEngine 3070: 0xFF (NaN) in pad payload and pad scales."""
    k, v = inputs(tokens, batch=1, heads=1, dk=64, dv=64)
    shard = Shard((Chunk(0, tokens),))
    for direction in DIRECTIONS:
        out = encode(wire, k, v, shard, direction)
        clean = opened(wire, k, v, shard, out.clone(), direction)
        layout = wire.layout(geometry(k, v), direction)
        records = out.view(-1, layout.nbytes)
        used = tokens - (shard.records - 1) * RECORD
        for operand in layout.operands:
            layout.payload(operand, records[-1:])[..., used:, :] = 0xFF
            blocks = torch.zeros(operand.scale_shape, dtype=torch.uint8)
            if operand.along == "d":
                blocks[used:] = 1
            else:
                blocks[:, -(-used // 32) :] = 1
            layout.scales(operand, records[-1:])[..., to_atoms(blocks) == 1] = 0xFF
            outside = to_atoms(torch.zeros_like(blocks)) == E8M0.neutral  # not scales at all
            layout.scales(operand, records)[..., outside] = 0xFF
        dirty = opened(wire, k, v, shard, out, direction)
        for a, b in zip(
            dirty.keys_values(0, 0, tokens), clean.keys_values(0, 0, tokens), strict=True
        ):
            assert torch.isfinite(a).all() and torch.equal(a, b)


# ---- isolation ----------------------------------------------------------------------------------


def moved(wire: MxWire, direction: Direction, which: str) -> tuple[Tensor, float]:
    """Tokens whose decoded values change when token 40 of 128 grows 1000 times, and the share
    of the elements of its tile (its own token's left out) that do."""
    k, v = inputs(RECORD, batch=1, heads=1, dk=128, dv=128)
    shard = Shard((Chunk(0, RECORD),))
    index = 0 if which == "k" else 1
    before = opened(wire, k, v, shard, encode(wire, k, v, shard, direction), direction)
    was = before.keys_values(0, 0, RECORD)[index]
    (k, v)[index][:, 40] *= 1000
    after = opened(wire, k, v, shard, encode(wire, k, v, shard, direction), direction)
    changed = (after.keys_values(0, 0, RECORD)[index] != was)[0, :, 0]
    changed[40] = False
    return changed.any(-1).nonzero().flatten(), changed[32:64].sum().item() / (31 * 128)


@pytest.mark.parametrize("which", ["k", "v"])
def test_leakage_stays_within_a_tile_and_is_a_rounding(which):
    """A token 1000 times larger raises its tile's scale by 2^10, so what was within 2^-15 of the
    tile's largest loses bits below E4M3's normals: about 6% of the elements, none outside the
    tile."""
    tokens, share = moved(MXFP8, "backward", which)
    assert set(tokens.tolist()) <= set(range(32, 64)) - {40}
    assert 0.03 < share < 0.10


def test_one_by_32_isolates_tokens_where_blocks_run_along_d():
    assert moved(MXFP8_1X32, "backward", "k")[1] == 0
    assert moved(MXFP8_1X32, "backward", "v")[1] == 0
    assert moved(MXFP8_1X32, "forward", "v")[1] > 0  # along the sequence no MX format can


def test_plain_wires_isolate_to_the_bit():
    k, v = inputs(RECORD)
    shard, wire = Shard((Chunk(0, RECORD),)), wire_format("bf16", torch.bfloat16)
    out = torch.empty(wire.record_bytes(geometry(k, v), "forward"), dtype=torch.uint8)
    wire.encode(k, v, shard, out, "forward")
    before = [x.clone() for x in out.view(RECORD, -1)]
    k[:, 40] *= 1000
    wire.encode(k, v, shard, out, "forward")
    changed = [t for t in range(RECORD) if not torch.equal(out.view(RECORD, -1)[t], before[t])]
    assert changed == [40]


@every_wire
@both_directions
def test_documents_of_128_tokens_never_touch_each_other(wire, direction):
    """Scaling everything but one document by 1000 leaves its decoded bits alone."""
    cu = [0, 200, 230, 358, 360, 600]
    mask = documents(cu)
    shard = contiguous(600, 1).split(wire.split_at(mask)).shards[0]
    k, v = inputs(600, batch=1, heads=1)
    before = opened(wire, k, v, shard, encode(wire, k, v, shard, direction), direction)
    for start, stop in ((0, 200), (230, 358), (360, 600)):
        others = torch.ones(600, dtype=torch.bool)
        others[start:stop] = False
        k2, v2 = k.clone(), v.clone()
        k2[:, others] *= 1000
        v2[:, others] *= 1000
        after = opened(wire, k2, v2, shard, encode(wire, k2, v2, shard, direction), direction)
        for c, chunk in enumerate(shard.chunks):
            if start <= chunk.start < stop:
                for a, b in zip(
                    before.keys_values(c, 0, chunk.count),
                    after.keys_values(c, 0, chunk.count),
                    strict=True,
                ):
                    assert torch.equal(a, b)


def test_documents_are_cut_per_batch_row():
    """Starts of another batch row must not make a long document look like two short ones."""
    rows = stack([documents([0, 200, 400]), documents([0, 100, 300, 400])])
    assert MXFP8.split_at(rows) == (100, 200, 300)
    assert MXFP8.split_at(causal(400)) == ()
    assert MXFP8.split_at(documents([0, 30, 60, 400])) == (60,)  # two short ones share a record
    assert wire_format("bf16", torch.bfloat16).split_at(rows) == ()


# ---- what is not finite -------------------------------------------------------------------------


@every_wire
@both_directions
def test_nan_and_infinity_arrive_as_nan_and_nowhere_else(wire, direction):
    k, v = inputs(RECORD)
    shard = Shard((Chunk(0, RECORD),))
    clean = opened(wire, k, v, shard, encode(wire, k, v, shard, direction), direction)
    clean_k, clean_v = clean.keys_values(0, 0, RECORD)
    k[1, 50, 0, 3], v[0, 70, 1, 4] = math.nan, -math.inf
    view = opened(wire, k, v, shard, encode(wire, k, v, shard, direction), direction)
    for got, was, at in zip(
        view.keys_values(0, 0, RECORD),
        (clean_k, clean_v),
        ([1, 50, 0, 3], [0, 70, 1, 4]),
        strict=True,
    ):
        assert got.isnan().nonzero().tolist() == [at]
        assert torch.equal(got.nan_to_num(0), was.masked_fill(got.isnan(), 0))
    layout = wire.layout(geometry(k, v), direction)
    for operand in layout.operands:
        scales = layout.scales(operand, view.records)
        assert (scales != E8M0.nan).all()


def test_dequantise_reads_what_the_wire_wrote():
    """The table decoder and the payload agree on every code, NaN included."""
    payload = torch.arange(256, dtype=torch.uint8).view(8, 32)
    scales = torch.full((8, 1), E8M0.neutral, dtype=torch.uint8)
    values = dequantise(payload, scales, ALONG_D, torch.float32).flatten()
    torch.testing.assert_close(values, torch.tensor(E4M3.values), rtol=0, atol=0, equal_nan=True)
