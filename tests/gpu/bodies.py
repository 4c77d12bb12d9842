"""What one rank does on a GPU in tests of the transports, beside the bodies of the contract."""

from __future__ import annotations

import os
import time

import pytest
import torch
import transport_contract as contract
from ring_bodies import late_copies

from ringfa4.comm.interface import Control, Transport
from ringfa4.errors import ContextBrokenError, PeerError


def late_calls(rank: int, transport: Transport, control: Control, *, calls: int) -> int:
    """Random calls with late copies; ranks agree only now and then, so they drift."""
    with late_copies(rank):
        for call in range(calls):
            plans = contract.schedules(transport.world, call, backward=True, scale=4096)
            contract.make_call(
                transport, control, plans, call, agree=not transport.ready(plans[rank])
            )
    return calls


def many_calls(rank: int, transport: Transport, control: Control, *, calls: int) -> int:
    """Back to back, without agreeing: the transport alone keeps the ranks in step."""
    plans = contract.full(transport.world, 1 << 16, backward=True)
    for call in range(calls):
        contract.make_call(transport, control, plans, call, agree=False)
    return calls


def killed(rank: int, transport: Transport, control: Control, *, culprit: int) -> float:
    """One rank dies after a peer has enqueued its waits for it; how long that takes to notice."""
    plans = contract.full(transport.world, 1 << 16, backward=False)
    contract.make_call(transport, control, plans, 0)
    exchange = transport.open(plans[rank])
    if rank == culprit:
        torch.cuda.synchronize()
        time.sleep(1.0)
        os._exit(9)
    exchange.outbox().zero_()
    exchange.publish()
    since = time.monotonic()
    view = exchange.fetch(1).wait()
    exchange.finish()
    torch.cuda.synchronize()  # returns, although the source never published
    with pytest.raises(PeerError, match=rf"rank {culprit}: no published records within"):
        transport.open(plans[rank])
    with pytest.raises(ContextBrokenError):
        transport.open(plans[rank])
    assert view is not None and bool(torch.isnan(view.view(torch.float32)).all())
    transport.close()
    return time.monotonic() - since


def stranded_by_killed(rank: int, transport: Transport, control: Control, *, culprit: int) -> str:
    """As :func:`killed`, where the device's wait cannot be ended: nobody returns from it."""
    plans = contract.full(transport.world, 1 << 16, backward=False)
    contract.make_call(transport, control, plans, 0)
    torch.cuda.synchronize()
    exchange = transport.open(plans[rank])
    if rank == culprit:
        time.sleep(1.0)
        os._exit(9)
    exchange.outbox().zero_()
    exchange.publish()
    exchange.fetch(1).wait()
    torch.cuda.synchronize()
    return "went on without what was to be received"


def refused_capture(rank: int, transport: Transport, control: Control) -> str:
    plans = contract.full(transport.world, 256, backward=False)
    contract.make_call(transport, control, plans, 0)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="CUDA graph") as refused,
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed"),
    ):
        torch.zeros(1, device=transport.device)  # torch warns of an empty graph
        transport.open(plans[rank])
    contract.make_call(transport, control, plans, 1)
    return str(refused.value)
