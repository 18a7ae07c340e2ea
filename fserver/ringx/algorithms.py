"""The table of the algorithms of ringx, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from . import exchanges, heads, schedules
from .exchanges import broadcasts, gather, halo, ring
from .schedules import FASTEST, LEAST, Blocks, Exchange, contiguous, full, zigzag


class Algorithm(NamedTuple):
    """A row of the table of what there is. forward and backward are by collectives."""

    masks: Mapping[bool, Blocks]  # of each mask that it has, causal or not
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    uneven: bool = False  # the ranks' lengths may differ
    together: int = 0  # owners from which are copied at a time; 0: none ever
    by_heads: bool = False  # each rank takes a part of the heads

    def layout(self, causal: bool) -> str:
        return "zigzag" if self.masks[causal] is zigzag else "contiguous"


def _keys(exchange: Exchange, masks: Mapping[bool, Blocks], most: int, **more: Any) -> Algorithm:
    how: dict[str, Any] = {"exchange": exchange, "most": most}
    forward = partial(schedules.forward, **how)
    return Algorithm(masks, forward, partial(schedules.backward, **how), **more)


def _queries(masks: Mapping[bool, Blocks], overlap: bool) -> Algorithm:
    forward = partial(exchanges.queries_forward, overlap=overlap)
    exchange = partial(broadcasts, ahead=overlap, behind=overlap)
    return _keys(exchange, masks, LEAST, uneven=True)._replace(forward=forward)


ALGORITHMS = {
    "X1": _queries({False: full}, overlap=False),
    "X1o": _queries({False: full}, overlap=True),
    "X2": _queries({True: contiguous}, overlap=False),
    "X2o": _queries({True: contiguous}, overlap=True),
    "X3": _keys(gather, {True: zigzag}, FASTEST, together=1 << 30),
    "X3b": _keys(gather, {False: full}, FASTEST, together=1 << 30),
    "X4": _keys(broadcasts, {True: zigzag}, LEAST, together=1),
    "X4o": _keys(partial(broadcasts, behind=True), {True: zigzag}, LEAST),
    "ring": _keys(ring, {True: zigzag, False: full}, LEAST),
    "ulysses": Algorithm(
        {True: contiguous, False: full}, heads.forward, heads.backward, by_heads=True
    ),
}

SLIDING = _keys(halo, {True: contiguous}, FASTEST, uneven=True)
"""What `auto` is for a window, with packed documents or without."""

GATHER_LIMIT = 4 << 30
"""Bytes of gathered k, v, dk and dv on a rank above which `auto` takes X4 instead of X3."""

RING_TOKENS = 8192
"""Local tokens up to which `auto` takes the ring between two GPUs."""


def automatic(
    causal: bool, tokens: int, ranks: int, *, queries: int, keys: int, gathered: int,
    even: bool = True, copies: bool = False, direct: bool = True,
) -> str:  # fmt: skip
    """Chooses the algorithm of ``"auto"``. All that it may choose for a mask have one layout, as
    `layout_of` does not know the length: zigzag under a causal mask (X3, X4, ring), else contiguous
    (X1o, X3b, ring).

    The rule is from times of forward and backward, in percent of the time of one GPU divided by the
    number of GPUs, with 32 heads of q and 8 of k and v (32 under a full mask), 128 wide
    (docs/results). On two GPUs the ring is ahead up to 16K tokens in all:

        two H100, causal    8K: ring 51, Ulysses 49, X3 44, X4 40    32K: X3 92, ring 90, X4 90
        two H200, causal    16K: ring 87, X3 85                      32K: X3 93, ring 92, X4 92
        two H200, full      8K: ring 64, X3b 62                      32K: X3b 88, ring 87
        four H200, causal   8K: X3 23, ring 17                       256K: X3 104, X4 101

    `tokens` are the local rows of q. X1o moves `queries` bytes forward, X3b `keys` bytes, and X3
    gathers keys, values and their gradients of `gathered` bytes on a rank. Only X1o has ranks of
    lengths that differ (not `even`). The ring makes no `copies`, and is taken only
    between GPUs that send to each other (`direct`), not by way of the CPU, as over gloo.
    """
    if not even:
        return "X1o"
    if causal and gathered > GATHER_LIMIT:
        return "X4"
    if not causal and queries < keys:
        return "X1o"
    if direct and ranks == 2 and tokens <= RING_TOKENS and not copies:
        return "ring"
    return "X3" if causal else "X3b"
