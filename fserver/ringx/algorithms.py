"""The table of the algorithms of ringx."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from . import documents, schedules, sliding


class Algorithm(NamedTuple):
    """A row of the table of what there is. forward and backward are by collectives."""

    blocks: schedules.Blocks
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    uneven: bool = False  # the ranks' lengths may differ
    together: int = 0  # owners from which are copied at a time; 0: none ever

    @property
    def causal(self) -> bool:
        return self.blocks is not schedules.full

    @property
    def layout(self) -> str:
        return "zigzag" if self.blocks is schedules.zigzag else "contiguous"


def _queries(blocks: schedules.Blocks, overlap: bool) -> Algorithm:
    forward = partial(schedules.queries_forward, overlap=overlap)
    backward = partial(schedules.broadcast_backward, ahead=overlap, behind=overlap)
    return Algorithm(blocks, forward, backward, uneven=True)


def _gather(blocks: schedules.Blocks, pieces: int, together: int = 0) -> Algorithm:
    forward = partial(schedules.gather_forward, pieces=pieces)
    backward = partial(schedules.gather_backward, pieces=pieces)
    return Algorithm(blocks, forward, backward, together=together)


def _broadcast(behind: bool, together: int = 0) -> Algorithm:
    backward = partial(schedules.broadcast_backward, ahead=True, behind=behind)
    return Algorithm(schedules.zigzag, schedules.broadcast_forward, backward, together=together)


EVERY_OWNER = 1 << 30

ALGORITHMS = {
    "X1": _queries(schedules.full, overlap=False),
    "X1o": _queries(schedules.full, overlap=True),
    "X2": _queries(schedules.contiguous, overlap=False),
    "X2o": _queries(schedules.contiguous, overlap=True),
    "X3": _gather(schedules.zigzag, pieces=1, together=EVERY_OWNER),
    "X3c": _gather(schedules.zigzag, pieces=2),
    "X3b": _gather(schedules.full, pieces=1, together=EVERY_OWNER),
    "X4": _broadcast(behind=False, together=1),
    "X4o": _broadcast(behind=True),
}

DOCUMENTS = Algorithm(schedules.zigzag, documents.forward, documents.backward)
"""What X3 and `auto` are for packed documents."""

SLIDING = Algorithm(schedules.contiguous, sliding.forward, sliding.backward, uneven=True)
"""What `auto` is for a window, with packed documents or without."""
