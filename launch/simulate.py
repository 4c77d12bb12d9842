"""Predict a ring on machines that are not at hand: the plan's own steps on a model of the machine.

    python launch/simulate.py --seq 1M,4M,16M --ranks 72                  GB200 NVL72
    python launch/simulate.py --seq 1M --ranks 72,144 --png model.png     two, over 400G NICs
    python launch/simulate.py --seq 1M --ranks 8 --machine h200x8 --wire bf16 --trace t.json

Everything printed is modelled from the rates that are printed with it, each with its source; any of
them is replaced by --rate NAME=X. How the model works and what it leaves out:
:mod:`ringfa4.launch.simulate_ring`. torch is not loaded. Exit codes: 0 done, 1 refused, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from ringfa4.launch import simulate_picture
from ringfa4.launch.console import Console
from ringfa4.launch.masks import build_mask
from ringfa4.launch.options import (
    SHARDINGS,
    Parser,
    add_mask_options,
    exit_code_of_plan_tool,
    require_folders,
    typed,
)
from ringfa4.launch.plan_numbers import MX_WIRES, Numbers, Shape
from ringfa4.launch.simulate_machine import MACHINES, RATES, Machine, machine_named
from ringfa4.launch.simulate_ring import KERNELS, Outcome, Setting, simulate
from ringfa4.launch.sizes import bytes_text, parse_size, parse_sizes, size_text
from ringfa4.shard import RECORD, by_name
from ringfa4.topology import Topology

WIRES = ("mxfp8", "mxfp8-1x32", "bf16")

SHARE = 0.01
"""Of a call's time: what MXFP8 on the wire has to save to pay, and what counts as exposed."""

EPILOG = """\
examples:
  python launch/simulate.py --seq 1M,2M,4M,8M,16M --ranks 72,288 --png model.png
  python launch/simulate.py --seq 1M --ranks 72 --kv-heads 64 --crossover
  python launch/simulate.py --seq 256K --ranks 8 --machine h200x8 --wire bf16 --rate link_gbs=300
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One row: what is simulated on the machine."""

    seq: int
    ranks: int
    wire: str
    backward: bool


def parser() -> Parser:
    made = Parser(
        prog="simulate.py",
        description="Predict time, efficiency and memory of a ring. Sizes take K, M, G (binary).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    count, usual = typed(parse_size, 1), Shape(heads=64)
    what = made.add_argument_group("the problem")
    what.add_argument("--seq", type=typed(parse_sizes), default=[1 << 20], metavar="N,N")
    what.add_argument("--ranks", type=typed(parse_sizes), default=[72], metavar="N,N")
    what.add_argument("--batch", type=count, default=1, metavar="N")
    what.add_argument("--heads", type=count, default=usual.heads, metavar="N", help="default 64")
    what.add_argument("--kv-heads", type=count, default=8, metavar="N", help="default 8")
    what.add_argument("--head-dim", type=count, default=usual.dk, metavar="N", help="default 128")
    what.add_argument("--v-head-dim", type=count, metavar="N", help="of values (as --head-dim)")
    add_mask_options(made)
    how = made.add_argument_group("how it is computed")
    how.add_argument("--sharding", choices=SHARDINGS, default="zigzag")
    how.add_argument("--wire", type=_wires, default=["mxfp8", "bf16"], metavar="NAME,NAME")
    how.add_argument("--kernel", choices=KERNELS, help="format of its operands (as the wire)")
    how.add_argument(
        "--direct", action="store_true", help="read across domains directly: nobody carries"
    )
    how.add_argument("--fused", action="store_true", help="merges in the kernel's epilogue")
    how.add_argument(
        "--at-once", type=count, default=4, help="partials merged in one pass (default 4)"
    )
    how.add_argument("--depth", type=count, default=1, help="steps fetched ahead (default 1)")
    how.add_argument("--forward-only", action="store_true")
    where = made.add_argument_group("the machine")
    where.add_argument("--machine", choices=sorted(MACHINES), default="gb200-nvl72")
    where.add_argument("--domain", type=count, metavar="N", help="GPUs of an NVLink domain")
    where.add_argument(
        "--rate", type=_rate, action="append", default=[], metavar="NAME=X", help="replace a rate"
    )
    shown = made.add_argument_group("what comes out")
    shown.add_argument(
        "--crossover", action="store_true", help="below which length MXFP8 on the wire pays"
    )
    shown.add_argument("--png", metavar="FILE", help="efficiency against tokens and ranks")
    shown.add_argument("--json", metavar="FILE", help="everything as JSON ('-': standard output)")
    shown.add_argument("--trace", metavar="FILE", help="timeline of one case, for ui.perfetto.dev")
    return made


def _wires(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in WIRES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown wire {unknown[0]!r}; there are {sorted(WIRES)}")
    return names


def _rate(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in RATES:
        raise argparse.ArgumentTypeError(f"unknown rate {name!r}; there are {sorted(RATES)}")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: {value!r} is not a number") from None


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code; ``argv`` None is the command line."""
    return exit_code_of_plan_tool("simulate.py", parser(), show, argv)


def show(options: argparse.Namespace, command: str) -> None:
    """Simulate what ``options`` describe, print it, and write what files they name."""
    console = Console(sys.stderr if options.json == "-" else sys.stdout, speaks=True)
    require_folders(png=options.png, json=options.json, trace=options.trace)
    machine = _machine(options)
    shape = _shape(options)
    cases = _cases(options)
    console.say(f"launch/simulate.py {command}")
    console.say(f"modelled, not measured: {title(options, machine, shape)}")
    console.table(rates_table(machine), numbers=False)
    console.say()
    outcomes = []
    for n, case in enumerate(cases):
        if console.terminal:
            console.rewrite(f"case {n + 1} of {len(cases)} ...")
        outcomes.append((case, outcome(options, machine, shape, case)))
    console.say("modelled; merge and exposed (what compute waited for): of the rank that ends last")
    console.table(results_table(outcomes))
    found = list(crossovers(options, machine, shape)) if options.crossover else []
    for line in found:
        console.say(str(line))
    if options.png is not None:
        heading = f"modelled: {title(options, machine, shape)}"
        simulate_picture.save(outcomes, options.png, heading)
        console.say(f"wrote {options.png}")
    if options.trace is not None:
        case, first = outcomes[0]
        Path(options.trace).write_text(json.dumps(trace(first)))
        console.say(f"wrote {options.trace}: {case}; open it at ui.perfetto.dev")
    if options.json is not None:
        text = as_json(command, machine, outcomes, found)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text + "\n")
            console.say(f"wrote {options.json}")


def _machine(options: argparse.Namespace) -> Machine:
    machine = machine_named(options.machine).replaced(dict(options.rate))
    return machine if options.domain is None else replace(machine, domain=options.domain)


def _shape(options: argparse.Namespace) -> Shape:
    dv = options.v_head_dim or options.head_dim
    return Shape(options.batch, options.heads, options.kv_heads, options.head_dim, dv)


def _cases(options: argparse.Namespace) -> list[Case]:
    passes = (False,) if options.forward_only else (False, True)
    found = [Case(*how) for how in product(options.seq, options.ranks, options.wire, passes)]
    if any(case.ranks < 1 for case in found):
        raise ValueError(f"--ranks {options.ranks}: at least one")
    return found


def outcome(
    options: argparse.Namespace, machine: Machine, shape: Shape, case: Case, kernel: str = ""
) -> Outcome:
    """``kernel`` overrides what the options say."""
    mask = build_mask(options, case.seq, case.seq)
    q_side, k_side = (by_name(options.sharding, mask, case.ranks, side) for side in "qk")
    topology = None
    if case.ranks > machine.domain and not options.direct:
        topology = Topology.even(case.ranks, -(-case.ranks // machine.domain))
    numbers = Numbers.of(
        mask, q_side, k_side, case.wire, shape, backward=case.backward, topology=topology
    )
    as_wire = "mxfp8" if case.wire in MX_WIRES else "bf16"
    taken = kernel or options.kernel or as_wire
    return simulate(numbers, machine, Setting(taken, options.fused, options.at_once, options.depth))


# ---- where MXFP8 on the wire begins to pay ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Crossover:
    """``seq``: up to which length ``what`` holds, in steps of two records a rank; 0 when it holds
    nowhere, ``longest`` when everywhere that was looked.
    """

    what: str
    ranks: int
    backward: bool
    seq: int
    longest: int

    def __str__(self) -> str:
        way = "backward" if self.backward else "forward"
        where = f"up to {size_text(self.seq)} tokens"
        if self.seq == 0:
            where = "nowhere"
        elif self.seq == self.longest:
            where += " at least"
        return f"{self.ranks} ranks, {way}: {self.what} {where}"


def crossovers(options: argparse.Namespace, machine: Machine, shape: Shape) -> Iterator[Crossover]:
    """One kernel on both wires, so that only the bytes, and converting them, differ."""
    kernel = options.kernel or "mxfp8"
    passes = (False,) if options.forward_only else (False, True)
    for ranks, backward in product(options.ranks, passes):
        unit = 2 * ranks * RECORD
        most = max(1, max(options.seq) // unit)

        @cache
        def run(
            units: int, wire: str, ranks: int = ranks, backward: bool = backward, unit: int = unit
        ) -> Outcome:
            case = Case(units * unit, ranks, wire, backward)
            return outcome(options, machine, shape, case, kernel)

        def pays(units: int, run: Callable[[int, str], Outcome] = run) -> bool:
            return run(units, "bf16").seconds >= (1 + SHARE) * run(units, "mxfp8").seconds

        def exposed(units: int, wire: str, run: Callable[[int, str], Outcome] = run) -> bool:
            found = run(units, wire)
            return found.exposed["fetch"] + found.exposed["carry"] >= SHARE * found.seconds

        questions: dict[str, Callable[[int], bool]] = {
            f"MXFP8 on the wire saves {SHARE:.0%} or more ({kernel} kernel on both)": pays,
            f"bf16 on the wire exposes {SHARE:.0%} or more": partial(exposed, wire="bf16"),
            f"MXFP8 on the wire exposes {SHARE:.0%} or more": partial(exposed, wire="mxfp8"),
        }
        for what, question in questions.items():
            seq = last_true(question, most) * unit
            yield Crossover(what, ranks, backward, seq, most * unit)


def last_true(holds: Callable[[int], bool], most: int) -> int:
    """The largest n of 1..most for which ``holds``, which holds up to there; 0 when nowhere."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


# ---- text, JSON, timeline -----------------------------------------------------------------------


def title(options: argparse.Namespace, machine: Machine, shape: Shape) -> str:
    heads = f"{shape.heads}:{shape.heads_kv} heads of {shape.dk}"
    merges = "merges in the epilogue" if options.fused else "merges apart"
    over = f"domains of {machine.domain}" + ", read across directly" * options.direct
    return f"{machine.name}, {over}, {options.mask}, {options.sharding}, {heads}, {merges}"


def rates_table(machine: Machine) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("rate", "value", "what", "source")]
    for name, rate in machine.rates.items():
        rows.append((name, f"{rate.value:g}", RATES[name], rate.source))
    rows.append(("domain", str(machine.domain), "GPUs of an NVLink domain", "nominal, or --domain"))
    return rows


def results_table(outcomes: Sequence[tuple[Case, Outcome]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            "tokens", "ranks", "wire", "kernel", "pass", "time", "efficiency", "merge",
            "exposed K/V", "dK/dV", "binds", "memory",
        )
    ]  # fmt: skip
    for case, found in outcomes:
        total = found.seconds
        passes = sum(found.spent[kind] for kind in ("merge", "convert", "reduce"))
        rows.append(
            (
                size_text(case.seq).split()[0],
                str(case.ranks),
                case.wire,
                found.setting.kernel,
                "backward" if case.backward else "forward",
                f"{total:.3g} s" if total >= 1 else f"{1e3 * total:.3g} ms",
                f"{100 * found.efficiency:.1f}%",
                f"{100 * passes / total:.1f}%",
                f"{100 * (found.exposed['fetch'] + found.exposed['carry']) / total:.1f}%",
                f"{100 * found.exposed['grads'] / total:.1f}%",
                f"{found.binds} ({100 * found.units[found.binds] / total:.0f}%)",
                f"{bytes_text(found.memory_bytes)} ({100 * found.memory_share:.0f}%)",
            )
        )
    return rows


def as_json(
    command: str,
    machine: Machine,
    outcomes: Sequence[tuple[Case, Outcome]],
    lengths: Sequence[Crossover],
) -> str:
    """Everything, for programs; seconds and bytes."""
    results = [
        {
            **asdict(case),
            **asdict(found.setting),
            "seconds": found.seconds,
            "efficiency": found.efficiency,
            "spent_s": found.spent,
            "exposed_s": found.exposed,
            "units_s": found.units,
            "binds": found.binds,
            "memory_bytes": found.memory_bytes,
            "read_bytes": sum(found.numbers.read),
            "returned_bytes": sum(found.numbers.returned),
        }
        for case, found in outcomes
    ]
    body = {
        "command": f"launch/simulate.py {command}",
        "modelled": True,
        "machine": {"name": machine.name, "domain": machine.domain, "two_sided": machine.two_sided},
        "rates": {name: asdict(rate) for name, rate in machine.rates.items()},
        "results": results,
        "crossovers": [asdict(c) for c in lengths],
    }
    return json.dumps(body, indent=1)


LANES = {"compute": 0, "fetch": 1, "carry": 2, "grads": 3}


def trace(found: Outcome) -> dict[str, Any]:
    """The modelled timeline in Chrome's trace format: a process a rank, a row a lane."""
    events: list[dict[str, Any]] = []
    for rank in range(found.numbers.world):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0,
                       "args": {"name": f"rank {rank} (modelled)"}})  # fmt: skip
        for name, tid in LANES.items():
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid,
                           "args": {"name": name}})  # fmt: skip
    for op in found.ops:
        if op.kind == "post":
            continue
        tid = LANES.get(op.kind, LANES["compute"])
        work = found.numbers.steps[op.rank][op.step]
        args = {"step": op.step, "owner": work.owner, "bytes": op.nbytes}
        events.append({"ph": "X", "cat": "ring", "name": f"{op.kind} {op.step}", "pid": op.rank,
                       "tid": tid, "ts": 1e6 * op.start, "dur": 1e6 * (op.end - op.start),
                       "args": args})  # fmt: skip
    return {"displayTimeUnit": "ms", "traceEvents": events}


if __name__ == "__main__":
    sys.exit(main())
