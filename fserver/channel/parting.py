"""The ends of channels between GPUs: a side keeps its memory until nobody else uses it."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from fserver.errors import TimeoutError

if TYPE_CHECKING:
    from fserver.channel.gpu import GpuSide


class _Kept(NamedTuple):
    """A closed side whose memory peers may still write, or something here may use."""

    node: weakref.ref[Any]
    handle: int
    name: str
    side: GpuSide

    def parted(self, wait_ms: float = 0) -> bool:
        """Whether the peers have closed their sides, or are lost, within the time. Of a node that
        is closed nobody knows it."""
        node = self.node()
        return node is None or bool(node.channel_close(self.handle, wait_ms, "", False))


_kept: list[_Kept] = []


def close_gpu(node: Any, handle: int, name: str, side: GpuSide) -> None:
    """Ends a side, after telling the engine. Its memory goes at once, or with a later sweep."""
    kept = _Kept(weakref.ref(node), handle, name, side)
    _kept.append(kept)  # whatever comes
    with contextlib.ExitStack() as rest:
        rest.callback(sweep)
        rest.callback(side.end)
        node.channel_close(handle, 0, "", False)  # which sets the abort word


def sweep() -> None:
    """Gives back the memory of closed sides that nobody uses any more."""
    for kept in list(_kept):
        if kept.parted() and kept.side.close():
            with contextlib.suppress(ValueError):  # another thread's sweep
                _kept.remove(kept)


def wait(node: Any, name: str, timeout_ms: float) -> None:
    """Waits until the peers have closed their sides of an earlier channel of this name. They cannot
    open the next one before that.

    Raises:
        TimeoutError: they have not, within the time.
    """
    sweep()
    for kept in list(_kept):
        if kept.node() is node and kept.name == name and not kept.parted(timeout_ms):
            raise TimeoutError(
                f"channel: a peer has not closed its side of the earlier channel {name!r} within "
                f"timeout_ms={timeout_ms:g}: close it there, or give this channel another name"
            )
