"""`fserver bench graph af`: the time of a micro-batch."""

from __future__ import annotations

import math
from typing import Any

from .. import others
from ..sides import Side
from .traffic import Opened, Traffic, joined, ours


def af(side: Side, mode: str, shape: tuple[int, ...], **how: Any) -> dict[str, Any]:
    """Times channels of ours."""
    with side.node() as own:
        return _timed(side, ours(side, own, mode, shape), shape, **how)


def af_by(side: Side, by: str, shape: tuple[int, ...], **how: Any) -> dict[str, Any]:
    """Times another's way, in a process that did not use one before."""
    with joined(side, by):
        return _timed(side, others.channels(by, side, shape), shape, **how)


def _timed(
    side: Side, opened: Opened, shape: tuple[int, ...], streams: str, replays: int, parts: int
) -> dict[str, Any]:
    """Times replays in so many parts, each of which begins with a checked one."""
    t = Traffic(side, opened, shape, streams=streams)
    t.capture()
    wrong, took = t.checked(), []
    t.timed(min(20, replays))
    for _ in range(parts):
        wrong += t.checked()
        took += t.timed(math.ceil(replays / parts))
        with side.on(t.main):
            wrong += t.wrong()
    with side.on(t.main):
        idle = side.captured(lambda: t.body(talk=False), t.main)
        idle()
        begin = side.mark()
        idle()
        end = side.mark()
    t.close()
    return {"took_ms": took, "wrong": wrong, "kernels_us": 1e3 * begin.elapsed_time(end) / t.per}
