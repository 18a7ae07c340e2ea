"""Handle: what Worker.push_pull returns."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, ClassVar

from fserver.errors import ConfigError, Error

if TYPE_CHECKING:
    from fserver.aio import Loops


class Handle(int):
    """A push_pull that has been started: an int that can be waited for.

    ``Worker.push_pull`` returns it. It is the int that the other calls take and that numbers the
    request in log lines and errors, so that code written for ints goes on working. Copies and
    pickles of it are plain ints. Handles of two workers are never equal; a handle and a plain int
    are equal if their numbers are.

    A handle does not keep its worker open. After the worker has been closed, ``done()`` is True,
    and ``wait()`` and ``await`` raise ClosedError.

    Example:
        ```python
        handle = worker.push_pull([x], [0], [y], [0])
        handle.wait(timeout_ms=1000)  # in a thread

        handle = worker.push_pull([x], [0], [y], [0])
        await handle  # in a coroutine: other tasks of the event loop run meanwhile
        ```
    """

    __slots__ = ()

    # Of the worker. Each worker has a subclass, so that a handle costs what an int costs.
    _loops: ClassVar[Loops | None] = None

    def wait(self, timeout_ms: float = 10000) -> None:
        """Returns when all answers of the push_pull have been written.

        Args:
            timeout_ms: limit in milliseconds, counted from this call. 0: only look.

        Raises:
            TimeoutError: the limit is over. The request goes on, and the handle stays valid.
            Error: as ``Worker.wait``.
        """
        self._of("wait").open_node("wait").wait(self, timeout_ms)

    def done(self) -> bool:
        """Reports whether ``wait`` would return or raise at once. Never blocks or raises.

        A loop over ``done()`` makes progress: each call looks for what has arrived.
        """
        node = self._node()
        return node is None or bool(node.done(self))

    def __await__(self) -> Generator[Any, None, None]:
        """Waits in an asyncio event loop, without a thread; raises as ``wait``.

        There is no limit of time: use ``asyncio.timeout`` or ``asyncio.wait_for``. When the await
        is cancelled, the push_pull goes on, and the handle can be awaited or waited for again.
        Any number of coroutines, of several event loops too, may await one handle.
        """
        return self._of("await").wait(self).__await__()

    def _node(self) -> Any:
        return None if self._loops is None else self._loops.node()

    def _of(self, call: str) -> Loops:
        if self._loops is None:
            raise ConfigError(
                f"{call}: this Handle is of no worker: take the one that Worker.push_pull returns"
            )
        return self._loops

    def __eq__(self, other: object) -> bool:
        """Compares numbers, and workers where ``other`` is a Handle.

        ``asyncio.gather`` takes equal arguments for one.
        """
        if isinstance(other, Handle) and other._loops is not self._loops:
            return False
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__

    def __str__(self) -> str:
        return int.__repr__(self)

    def __repr__(self) -> str:
        node = self._node()
        if node is None:
            return f"<fserver.Handle {self}>"
        return f"<fserver.Handle {self} of worker {node.rank}: {self._state(node)}>"

    def _state(self, node: Any) -> str:
        if node.closed:
            return "closed"
        if node.ticket(self):
            return "under way"
        try:
            node.wait(self, 0)
        except Error as error:
            return f"failed: {type(error).__name__}"
        return "completed"

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def handles_of(loops: Loops) -> type[Handle]:
    """The type of the handles of one worker."""
    return type("Handle", (Handle,), {"__slots__": (), "_loops": loops, "__module__": "fserver"})
