"""How an asyncio event loop waits for a node: on a descriptor, without a thread for each call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fserver.errors import ClosedError, ConfigError, Error

if TYPE_CHECKING:
    from torch import Tensor

_BATCH = 0  # in the place of a ticket: whoever waits looks for a batch itself


def _release(node: weakref.ref[Any], watch: int, fd: int) -> None:
    """Closes a watch that no event loop uses any more."""
    if (alive := node()) is not None:
        with contextlib.suppress(Error):
            alive.watch_close(watch)
    os.close(fd)


class _Watch:
    """The coroutines of one event loop that wait for one node. Used in the loop's thread alone.

    The engine writes to an eventfd when something may have ended. The loop reads it, and wakes the
    coroutines whose tickets have ended. The watch refers to the node weakly: each coroutine that
    waits keeps the node alive.
    """

    def __init__(self, node: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._node = weakref.ref(node)
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._number = node.watch_open(self._fd)
        except BaseException:
            os.close(self._fd)
            raise
        weakref.finalize(self, _release, self._node, self._number, self._fd).atexit = False
        self._waiting: dict[asyncio.Future[None], int] = {}
        self._looks = self._rang = False  # a timer of _leave runs; its handle would make a cycle
        loop.add_reader(self._fd, self._ready)

    @contextlib.contextmanager
    def future(self, ticket: int) -> Iterator[asyncio.Future[None]]:
        """A future that is set when a ticket has ended, or, with ``_BATCH``, when a batch may have
        come: arms the watch, so look again before awaiting it."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = ticket
        try:
            if not self._arm():
                future.set_result(None)
            yield future
        finally:
            del self._waiting[future]

    def _arm(self) -> bool:
        """Reports whether the engine will wake the loop. Else the node is closed, and so says the
        call that looks."""
        node = self._node()
        if node is None:
            return False
        try:
            node.watch_arm(self._number)
        except Error:
            return False
        return True

    def _ready(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        node = self._node()
        self._rang = True
        self._leave()
        if self._waiting:
            self._set_ended(node)
            if any(not future.done() for future in self._waiting):
                armed = self._arm()
                self._set_ended(node if armed else None)  # it may have come before

    def _leave(self, later: float = 1.0) -> None:
        """Leaves the loop if the node is closed. The engine rings just before the node says so, so
        it is looked at again after 1 s, and after 10 s more."""
        loop, node = asyncio.get_running_loop(), self._node()
        if node is None or node.closed:
            loop.remove_reader(self._fd)
        elif later and not self._looks:
            self._looks, self._rang = True, False
            loop.call_later(later, self._look_again, 10.0 if later < 10 else 0.0)

    def _look_again(self, later: float) -> None:
        self._looks = False
        self._leave(later or float(self._rang))  # a ring since then may be the last

    def _set_ended(self, node: Any) -> None:
        """Wakes the coroutines whose tickets have ended; without a node, all."""
        futures = list(self._waiting)
        places = range(len(futures))
        for i in places if node is None else node.ended(list(self._waiting.values())):
            if not futures[i].done():
                futures[i].set_result(None)


def _seconds(timeout_ms: float | None) -> float | None:
    if timeout_ms is None:
        return None
    try:
        if timeout_ms >= 0:
            return min(timeout_ms / 1e3, 1e9)
    except TypeError:
        pass
    raise ConfigError(f"get_batch: timeout_ms is {timeout_ms!r}, want milliseconds, 0 or more")


class Loops:
    """The event loops that wait for a node."""

    def __init__(self, node: Any) -> None:
        self._node = weakref.ref(node)
        self._lock = threading.Lock()
        self._watches: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch] = (
            weakref.WeakKeyDictionary()
        )

    def node(self) -> Any:
        """The node in the extension; None if it is gone."""
        return self._node()

    def open_node(self, call: str) -> Any:
        """The same, or ClosedError."""
        node = self._node()
        if node is None:
            raise ClosedError(f"{call}: the node is closed (its object has been dropped)")
        return node

    def _watch(self, node: Any) -> _Watch:
        loop = asyncio.get_running_loop()
        with self._lock:
            watch = self._watches.get(loop)
            if watch is None:
                watch = self._watches[loop] = _Watch(node, loop)
            return watch

    async def wait(self, handle: int) -> None:
        """Returns when a push_pull has completed; raises as Worker.wait, without a limit."""
        node = self.open_node("wait")
        if not node.done(handle) and (ticket := node.ticket(handle)):
            with self._watch(node).future(ticket) as future:
                if not node.ended([ticket]):
                    await future
        node.wait(handle, 0)

    async def get_batch(
        self, timeout_ms: float | None, at_least: int | None
    ) -> list[tuple[int, list[Tensor], list[int]]]:
        """As Server.get_batch."""
        node = self.open_node("get_batch")
        limit = _seconds(timeout_ms)
        begin = time.monotonic()
        while True:
            batch: list[tuple[int, list[Tensor], list[int]]] = node.get_batch(0, at_least)
            if batch:
                return batch
            with self._watch(node).future(_BATCH) as future:
                batch = node.get_batch(0, at_least)  # it may have come before
                if batch:
                    return batch
                left = None if limit is None else begin + limit - time.monotonic()
                if left is not None and left <= 0:
                    return []
                await asyncio.wait([future], timeout=left)
