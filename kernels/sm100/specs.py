"""What of the SM100 kernel is fixed at compile time, how it is called, and where it keeps what.

    S = Q K^T,   P = 2^(S scale log2 e - reference),   O = P V:  both products block-scaled E4M3

Tables, int32, one line for each item and segment (:mod:`ringfa4.kernels.sm100.worklist`); items
are made for ``ctas`` thread blocks a work:

    items     batch, q_record, tiles, row, first, rows, seg0, seg1
    segments  record, q0, q1, k0, k1, lo, hi, 0

Q records lie as those of K do: [b][heads_q][128 rows][dk] payload, [b][heads_q][n(dk)] scale atoms
along d, each chunk from a new record on.

Nothing of the DSL is imported here, so that hosts read it without the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

ROWS = 128
"""Queries of a tile and keys of a record: M of both products, N of the first."""

ATOM = 512
"""Bytes of 128 rows x 4 scales."""

ITEM_WORDS = SEGMENT_WORDS = 8

EMULATED = {"sm_100a": 12, "sm_103a": 0}
"""Of each 32 exponentials, how many are polynomials: the exp unit of SM103 is twice as fast."""

CTAS = {"sm_100a": 1, "sm_103a": 2}
"""Thread blocks that compute a work together. Of a pair, products read half as much of B from each
shared memory, which is what binds SM103; exponentials bind SM100, which gains nothing."""

LEAVE, WRITE, MERGE = 0, 1, 2
"""Modes of a row of the state: untouched, written (not read), merged into."""

ROW_WORDS, ROW_TOPS = 4, 2
"""What softmax keeps of a row in shared memory: its reference, sums and maximum, each an array by
row; and the offsets of its first two blocks, pairs by row: no two rows of a warp share a bank.
"""

SHARED_LIMIT = 227 * 1024
"""Dynamic shared memory that a thread block can have on SM100."""


@dataclass(frozen=True)
class ForwardSpec:
    """``dk`` 64, 128 or 192, ``dv`` 64 or 128; ``emulated``: how many of each 32 exponentials are
    polynomials on the FMA units, an even number; ``ctas`` 1, or 2: two thread blocks, a cluster,
    compute a work together, each half of its queries, each with half of K and V.

    ``SIGNATURE`` of the host function, "q" 64-bit, "i" 32-bit integers, "f" fp32:

        q_records q       address, 128-byte aligned          acc q, max q, sum q   state addresses
        q_record_bytes q  of one record                      acc_b q, acc_s q      strides of acc
        q_payload q       offset in a record                 row_b q, row_h q      of max and sum
        q_scales q        offset in a record                 items q, segments q   table addresses
        n_q_records i                                        modes q               uint8, address
        kv_records q      address, 128-byte aligned          modes_row q           stride of a batch
        kv_record_bytes q                                    n_items i
        k_payload q, v_payload q, k_scales q, v_scales q     scale f               of the logits
        n_kv_records i                                       ctas i                thread blocks
        batch i, heads_q i, heads_kv i

    in the left column's order, then the right's. Strides are bytes; acc is (b, s, heads_q, dv) with
    heads contiguous, max and sum (b, heads_q, s) with s contiguous, modes (b, s). The device
    function takes three tensor maps (Q, K, V), then ``DEVICE``. Block (THREADS, 1, 1), cluster
    (spec.ctas, 1, 1), grid (ctas, 1, 1), a multiple: of its n clusters, w % n takes the work
    w = item * heads_q + head.
    """

    SIGNATURE: ClassVar[str] = "qqqqiqqqqqqiiiiqqqqqqqqqqqifi"
    DEVICE: ClassVar[tuple[str, ...]] = (
        *("q_records", "q_record_bytes", "q_scales"),
        *("kv_records", "kv_record_bytes", "k_scales", "v_scales"),
        *("heads_q", "heads_kv"),
        *("acc", "max", "sum", "acc_b", "acc_s", "row_b", "row_h"),
        *("items", "segments", "modes", "modes_row", "n_items", "scale"),
    )
    """What the device function takes after the maps of Q, K and V."""

    PARAMETERS: ClassVar[str] = "128s" * 3 + "q" * 7 + "ii" + "q" * 11 + "if"
    """The same as a format of :mod:`struct`, the maps first."""

    THREADS: ClassVar[int] = 768

    dk: int
    dv: int
    emulated: int
    ctas: int = 1

    def __post_init__(self) -> None:
        reason = self.refusal(self.dk, self.dv)
        assert reason is None, reason
        assert 0 <= self.emulated <= 32 and self.emulated % 2 == 0, self.emulated
        assert self.ctas in (1, 2), self.ctas

    @classmethod
    def of(cls, dk: int, dv: int, arch: str) -> ForwardSpec:
        """What runs on an architecture, a key of EMULATED and CTAS."""
        return cls(dk, dv, EMULATED[arch], CTAS[arch])

    @staticmethod
    def refusal(dk: int, dv: int) -> str | None:
        """Why there is no kernel for these head dimensions, or None."""
        if dk in (64, 128, 192) and dv in (64, 128):
            return None
        return (
            f"{dk=}, {dv=}: keys may have 64, 128 or 192 dimensions and values 64 or 128, since "
            "two 128-row tiles of logits and of outputs share 512 columns of tensor memory"
        )

    @property
    def span(self) -> int:
        """Bytes of a swizzled row of Q and K in shared memory; dk / span boxes make a tile."""
        return 128 if self.dk % 128 == 0 else 64

    @property
    def k_atoms(self) -> int:
        """Scale atoms of a tile of Q or K."""
        return -(-self.dk // 128)

    @property
    def early(self) -> bool:
        """Whether S comes in two halves, that of keys 64 to 127 before the O of the record before.

        Tensor memory has no room for the scales of both where a row has two atoms.
        """
        return self.k_atoms == 1

    @property
    def s_keys(self) -> int:
        """Keys of a product of S."""
        return ROWS // 2 if self.early else ROWS

    @property
    def slots(self) -> int:
        """Records of K and of V in flight."""
        return 3 if self.dk <= 128 or self.ctas == 2 else 2

    @property
    def k_rows(self) -> int:
        """Keys of a record that a thread block holds: a part of each product's."""
        return ROWS // self.ctas

    @property
    def k_box(self) -> int:
        """Of these, how many follow one another in the record."""
        return self.s_keys // 2 if self.ctas == 2 else ROWS

    @property
    def v_rows(self) -> int:
        """Columns of V that a thread block holds: rows of its payload, all 128 tokens."""
        return self.dv // self.ctas

    @property
    def shared(self) -> SharedMap:
        return SharedMap.of(self)

    @property
    def SHARED(self) -> int:
        """Bytes of dynamic shared memory of a launch."""
        return self.shared.nbytes


@dataclass(frozen=True)
class SharedMap:
    """Byte offsets in dynamic shared memory, whose base is a multiple of 1024.

    What swizzled copies write begins at a multiple of 1024. ``q`` and its scales hold two tiles,
    ``k`` and ``v`` what the thread block has of ``slots`` records, their scales all of it,
    ``p_scales`` an atom for each tile, ``rows`` and ``tops`` the words of the rows of two tiles,
    ``staging`` a tile of O, ``v_marks`` a bit for each token of a slot of V from each thread block
    that scans it.
    """

    q: int
    k: int
    v: int
    staging: int
    q_scales: int
    k_scales: int
    v_scales: int
    p_scales: int
    rows: int
    tops: int
    v_marks: int
    barriers: int
    tmem_base: int
    nbytes: int

    @classmethod
    def of(cls, spec: ForwardSpec) -> SharedMap:
        n, atoms = spec.slots, ATOM * spec.k_atoms
        k, v = spec.k_rows * spec.dk, ROWS * spec.v_rows
        sizes = [2 * ROWS * spec.dk, n * k, n * v, ROWS * spec.dv * 4]
        sizes += [2 * atoms, n * atoms, n * ATOM, 2 * ATOM]
        sizes += [2 * ROWS * 4 * ROW_WORDS, 2 * ROWS * 4 * ROW_TOPS, 16 * spec.ctas * n]
        sizes += [-(-8 * len(Barriers.of(spec).arrivals) // 16) * 16, 16]
        offsets = [0]
        for size in sizes:
            assert offsets[-1] % 16 == 0, sizes
            offsets.append(offsets[-1] + size)
        assert offsets[-1] <= SHARED_LIMIT, (spec, offsets)
        return cls(*offsets)


@dataclass(frozen=True)
class Barriers:
    """Number of the first mbarrier of each kind; who arrives -> who waits, per use.

        q_full, k_full, v_full     load (and the bytes)         -> products, guard (V)
        q_empty, k_empty           products (commit)            -> load
        v_empty                    products (commit), guard     -> load
        s_full                     products (commit)            -> softmax of the half
        s_loaded                   softmax, once a warp         -> products
        p_ready                    softmax, once a warp         -> products
        p_rest                     softmax of the late half     -> products
        v_clean                    guard, of records with masks -> products
        o_full                     products (commit), softmax   -> epilogue
        o_empty                    epilogue, once a warp        -> products, softmax

    One of each kind for a tile (q, p, o), for a half of the keys of a tile (s: tile 0's halves,
    then tile 1's) or for a slot (k, v); ``arrivals`` of all of them, barrier by barrier, complete a
    phase.

    Of a pair, the leader's products wait for both thread blocks, at barriers of the leader's; what
    they commit arrives at both. There are more then:

        q_peer, k_peer, v_peer     the peer's relay, of its full -> products
        o_free                     epilogue, once a warp         -> products, in place of o_empty
    """

    q_full: int
    q_empty: int
    q_peer: int
    s_full: int
    s_loaded: int
    p_ready: int
    p_rest: int
    o_full: int
    o_empty: int
    o_free: int
    k_full: int
    k_empty: int
    k_peer: int
    v_full: int
    v_empty: int
    v_peer: int
    v_clean: int
    arrivals: tuple[int, ...]

    @classmethod
    def of(cls, spec: ForwardSpec) -> Barriers:
        ctas, tiles, slots = spec.ctas, 2, spec.slots
        extra = ctas - 1  # of a pair: one of each for one of each
        kinds = {  # name: (how many, arrivals that complete a phase)
            "q_full": (tiles, 1), "q_empty": (tiles, 1), "q_peer": (tiles * extra, 1),
            "s_full": (2 * tiles, 1), "s_loaded": (2 * tiles, 4 * ctas),
            "p_ready": (tiles, 8 * ctas), "p_rest": (tiles, 4 * ctas),
            "o_full": (tiles, 9), "o_empty": (tiles, 4), "o_free": (tiles * extra, 4 * ctas),
            "k_full": (slots, 1), "k_empty": (slots, 1), "k_peer": (slots * extra, 1),
            "v_full": (slots, 1), "v_empty": (slots, 3), "v_peer": (slots * extra, 1),
            "v_clean": (slots, ctas),
        }  # fmt: skip
        first: dict[str, int] = {}
        arrivals: list[int] = []
        for name, (count, needed) in kinds.items():
            first[name] = len(arrivals)
            arrivals += [needed] * count
        return cls(**first, arrivals=tuple(arrivals))
