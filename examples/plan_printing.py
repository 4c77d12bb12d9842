"""A plan is data: ask it who reads what, before anything runs. Neither torch nor a GPU.

    python examples/plan_printing.py

`launch/show_plan.py` prints and draws the same for any mask and sharding from the shell.
"""

from __future__ import annotations

from ringfa4 import mask, shard
from ringfa4.plan import Plan


def main() -> Plan:
    """A sliding window over four ranks: each reads the end of its neighbour's keys, and no more."""
    window = mask.window(4096, left=300)
    sharding = shard.contiguous(4096, 4)
    plan = Plan(window, sharding, sharding)
    print(f"busiest rank: {plan.balance:.3f} of the mean")
    for rank in range(plan.world):
        for step in plan.steps(rank):
            if step.tasks:
                read = f"{step.records} records of rank {step.owner}"
                whose = read if step.index else "its own K/V"
                print(f"rank {rank}, step {step.index}: {step.area:,} pairs with {whose}")
    return plan


if __name__ == "__main__":
    main()
