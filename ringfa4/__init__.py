"""ringfa4: exact attention over sequences that no single GPU holds.

    from ringfa4 import ContextParallel
    cp = ContextParallel(seq_len=1 << 20, mask="causal")
    out = cp.attention(q, k, v)

Names load when first used: plans and masks (:mod:`ringfa4.mask`, :mod:`ringfa4.shard`,
:mod:`ringfa4.plan`) need neither torch nor a GPU.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringfa4.api import ContextParallel, ring_attention
    from ringfa4.context import close_contexts
    from ringfa4.errors import ContextBrokenError, PeerError, PlanMismatchError, RingError
    from ringfa4.mask import Band, Mask
    from ringfa4.topology import Topology

__all__ = [
    "Band",
    "ContextBrokenError",
    "ContextParallel",
    "Mask",
    "PeerError",
    "PlanMismatchError",
    "RingError",
    "Topology",
    "close_contexts",
    "ring_attention",
]

__version__ = "0.1.0"

_HOME = {
    "Band": "mask",
    "ContextBrokenError": "errors",
    "ContextParallel": "api",
    "Mask": "mask",
    "PeerError": "errors",
    "PlanMismatchError": "errors",
    "RingError": "errors",
    "Topology": "topology",
    "close_contexts": "context",
    "ring_attention": "api",
}

# In a checkout kernels/, comm/ and launch/ lie beside this package. An installed copy elsewhere has
# them inside; but `python -m ...` from the checkout's root finds this folder first, without them.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and str(_root) not in __path__:
    __path__.append(str(_root))
del _root


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ringfa4' has no attribute {name!r}")
    return getattr(import_module(f"ringfa4.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
