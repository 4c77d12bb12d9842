"""The command line of launch/ring.py, parsed into a frozen :class:`Options`.

Only spelling is judged here (usage errors, exit code 2, with the offending text). Whether the
values fit together as an attention problem is for :mod:`ringfa4.launch.workload` and the library
(ValueError, exit code 1). None means "not said": defaults depend on the device or the input file.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from ringfa4.errors import RingError
from ringfa4.launch.sizes import parse_size, parse_sizes

MASKS = ("causal", "full", "window", "documents", "prefix", "chunked")
SHARDINGS = ("contiguous", "zigzag", "striped", "balanced")
DTYPES = ("bf16", "fp16", "fp32", "fp64")

EPILOG = """\
examples:
  torchrun --standalone --nproc-per-node 2 launch/ring.py --seq 64K --backward --check
  torchrun launch/ring.py --seq 1M --heads 1
  python launch/ring.py --seq 16K --virtual-ranks 5 --documents 1K,7K,8K --check
  python launch/ring.py --input qkv.safetensors --window 4K --output out.safetensors

exit codes: 0 done (and within tolerance), 1 refused, failed or past tolerance, 2 usage
"""


class UsageError(Exception):
    """What argparse would print before it exits; the caller decides which rank prints it."""

    def __init__(self, usage: str, message: str) -> None:
        self.usage = usage
        super().__init__(message)


class Parser(argparse.ArgumentParser):
    """Raises :class:`UsageError` where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(self.format_usage(), message)


@dataclass(frozen=True)
class Options:
    """One field per option, by its name."""

    seq: int | None
    seq_k: int | None
    batch: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    v_head_dim: int | None
    mask: str
    window: int | None
    documents: tuple[int, ...] | None
    prefix: int | None
    chunk: int | None
    sharding: str
    wire: str | None
    precondition: str
    domains: int | None
    kernel: str
    transport: str
    dtype: str | None
    device: str | None
    backward: bool
    virtual_ranks: int | None
    sink: bool
    scale: float | None
    input: str | None
    output: str | None
    check: bool
    check_rows: int
    json: str | None
    trace: str | None
    seed: int
    timeout: float
    repeat: int | None


def typed(parse: Callable[[str], object], at_least: int | None = None) -> Callable[[str], object]:
    """``parse`` as an argparse type whose ValueError message reaches the user."""

    def convert(text: str) -> object:
        try:
            value = parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if at_least is not None and isinstance(value, (int, float)) and value < at_least:
            raise argparse.ArgumentTypeError(f"{text!r} is less than {at_least}")
        return value

    return convert


def add_domains_option(group: argparse._ArgumentGroup) -> None:
    """``--domains``, of every command that plans."""
    group.add_argument(
        "--domains",
        type=typed(parse_size, 1),
        metavar="N",
        help="N NVLink domains of neighbouring ranks; K/V cross once into each (default: none)",
    )


def add_mask_options(parser: argparse.ArgumentParser) -> None:
    """The options that describe a mask; :func:`mask_name` reads them after parsing."""
    size, count = typed(parse_size, 0), typed(parse_size, 1)
    mask = parser.add_argument_group("mask (causal, unless one of its options says otherwise)")
    mask.add_argument("--mask", choices=MASKS)
    mask.add_argument("--window", type=size, metavar="L", help="see yourself and L keys back")
    mask.add_argument(
        "--documents",
        type=typed(parse_sizes),
        metavar="N | L,L,...",
        help="N documents of equal length, or the lengths; causal inside each",
    )
    mask.add_argument("--prefix", type=size, metavar="L", help="all see the first L keys")
    mask.add_argument("--chunk", type=count, metavar="L", help="causal inside blocks of L tokens")


def ring_parser(prog: str = "ring.py", epilog: str = EPILOG) -> Parser:
    """The parser of launch/ring.py; other launchers of the same job add options of their own."""
    parser = Parser(
        prog=prog,
        description="Run one ring attention, measure it and check it. Sizes take K, M, G (binary).",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    size, count = typed(parse_size, 0), typed(parse_size, 1)

    shape = parser.add_argument_group("the problem")
    shape.add_argument("--seq", type=size, metavar="N", help="tokens in all (default 64K)")
    shape.add_argument("--seq-k", type=size, metavar="N", help="keys, if not as many as queries")
    shape.add_argument("--batch", type=count, metavar="N")
    shape.add_argument("--heads", type=count, metavar="N", help="query heads")
    shape.add_argument("--kv-heads", type=count, metavar="N", help="key/value heads")
    shape.add_argument("--head-dim", type=count, metavar="N", help="of queries and keys")
    shape.add_argument("--v-head-dim", type=count, metavar="N", help="of values (as --head-dim)")
    shape.add_argument("--dtype", choices=DTYPES, help="of q, k and v (default bf16)")
    shape.add_argument("--scale", type=float, help="of the logits (default head_dim ** -0.5)")
    shape.add_argument("--sink", action="store_true", help="a random sink logit for each head")
    shape.add_argument("--seed", type=int, default=0, help="of the random inputs")
    shape.add_argument(
        "--input", metavar="FILE", help="safetensors with q, k, v (and dout), each (b, s, h, d)"
    )
    shape.add_argument("--output", metavar="FILE", help="safetensors for out, lse (dq, dk, dv)")

    add_mask_options(parser)

    how = parser.add_argument_group("how it is computed")
    how.add_argument("--sharding", choices=SHARDINGS, default="zigzag")
    how.add_argument(
        "--wire", metavar="NAME", help="of K and V (default mxfp8; bf16, fp16, fp32: as is)"
    )
    how.add_argument(
        "--precondition", metavar="NAME", default="none", help="none, hadamard, k-mean or both"
    )
    add_domains_option(how)
    how.add_argument("--kernel", metavar="NAME", default="auto")
    how.add_argument("--transport", metavar="NAME", default="auto")
    how.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    how.add_argument("--backward", action="store_true", help="compute gradients too")
    how.add_argument(
        "--virtual-ranks", type=count, metavar="N", help="N ranks as threads of this one process"
    )
    how.add_argument("--timeout", type=float, default=300.0, metavar="S", help="wait for a peer")

    what = parser.add_argument_group("what comes out")
    what.add_argument("--check", action="store_true", help="compare sampled rows with fp64")
    what.add_argument("--check-rows", type=count, default=32, metavar="N", help="rows to sample")
    what.add_argument(
        "--repeat",
        type=count,
        metavar="N",
        help="report the fastest of N (1; on a GPU 2: the first one compiles kernels)",
    )
    what.add_argument("--json", metavar="FILE", help="results as JSON ('-': standard output)")
    what.add_argument(
        "--trace", metavar="FILE", help="timeline of all ranks, as JSON for ui.perfetto.dev"
    )
    return parser


_MASK_OPTIONS = {
    "window": ("window",),
    "documents": ("documents", "window"),
    "prefix": ("prefix",),
    "chunked": ("chunk",),
}
"""Mask -> its options, the required one first."""


def mask_name(parser: Parser, values: argparse.Namespace) -> str:
    """``--mask``, or what its options imply."""
    given = [name for name in ("documents", "window", "prefix", "chunk") if _said(values, name)]
    mask = values.mask
    if mask is None:
        implied = [m for m in _MASK_OPTIONS if set(given) <= set(_MASK_OPTIONS[m]) and given]
        implied = [m for m in implied if _said(values, _MASK_OPTIONS[m][0])]
        if given and not implied:
            parser.error(f"--{' and --'.join(given)} belong to different masks")
        return implied[0] if given else "causal"
    allowed = _MASK_OPTIONS.get(mask, ())
    if allowed and allowed[0] not in given:
        parser.error(f"--mask {mask} needs --{allowed[0]}")
    for name in given:
        if name not in allowed:
            parser.error(f"--{name} {getattr(values, name)} has no meaning with --mask {mask}")
    return str(mask)


def _said(values: argparse.Namespace, name: str) -> bool:
    return getattr(values, name) is not None


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Options of ``argv`` (None: the process's own).

    Raises :class:`UsageError`, and SystemExit(0) after --help.
    """
    parser = ring_parser()
    return options_of(parser, parser.parse_args(argv))


def options_of(parser: Parser, values: argparse.Namespace) -> Options:
    """What :func:`ring_parser` parsed, its mask options settled. UsageError as above."""
    values.mask = mask_name(parser, values)
    if values.documents is not None:
        values.documents = tuple(values.documents)
    if not values.timeout > 0:
        parser.error(f"--timeout {values.timeout} must be positive")
    return Options(**{field.name: getattr(values, field.name) for field in fields(Options)})


def require_folders(**paths: str | None) -> None:
    """ValueError for an option whose file could not be written: better now than after the run."""
    for option, path in paths.items():
        if path is not None and not Path(path).parent.is_dir():
            raise ValueError(f"--{option} {path}: there is no folder {str(Path(path).parent)!r}")


def exit_code_of_plan_tool(
    program: str,
    parser: Parser,
    show: Callable[[argparse.Namespace, str], None],
    argv: Sequence[str] | None,
) -> int:
    """0 done, 1 refused, 2 usage: for programs of one process, without torch, that ``show`` what
    their options and mask describe. ``argv`` None is the command line.
    """
    try:
        options = parser.parse_args(argv)
        options.mask = mask_name(parser, options)
        show(options, shlex.join(sys.argv[1:] if argv is None else argv))
    except UsageError as error:
        print(f"{error.usage}{program}: error: {error}", file=sys.stderr)
        return 2
    except (ValueError, OSError, RingError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    return 0
