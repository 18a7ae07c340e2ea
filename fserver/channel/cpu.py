"""The side of a channel whose tensors are on the CPU. The engine carries the messages: a message of
the worker is a push_pull on the channel, and a message of the server is its answer."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fserver.errors import ClosedError, ConfigError, ShapeError, TimeoutError

if TYPE_CHECKING:
    from torch import Tensor

    from fserver import _C


# Between two looks at whether a peer has closed its side.
SLICE_MS = 200.0

# How to go on when a channel has ended.
REOPEN = "call close() on this channel, then open a new one on both sides"


def first_rows(tensor: Tensor, rows: int) -> Tensor:
    """Returns the first rows of a tensor. A tensor without dimensions is one row."""
    return tensor[:rows] if tensor.dim() else tensor.reshape(1)[:rows]


def copy_rows(to: Tensor, of: Tensor, rows: int) -> None:
    """Copies the first rows of a tensor. Autograd does not record it, and either tensor may be one
    that torch.inference_mode has made."""
    import torch

    with torch.inference_mode():
        first_rows(to, rows).copy_(first_rows(of, rows))


def rows_of(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def check_rows(rows: Sequence[int] | None, tensors: Sequence[Tensor]) -> list[int]:
    """Returns a number of rows for each tensor.

    Raises:
        ConfigError: ``rows`` is not a list of ints.
        ShapeError: ``rows`` has another length than ``tensors``, or a number is larger than the
            rows of its tensor.
    """
    if rows is None:
        return [rows_of(t) for t in tensors]
    try:
        given = list(rows)
    except TypeError:
        raise ConfigError(
            f"send: rows is {rows!r:.80}, want a list of ints, one for each tensor, or None"
        ) from None
    if len(given) != len(tensors):
        raise ShapeError(
            f"send: rows has {len(given)} numbers for {len(tensors)} tensors: give one number for "
            "each tensor"
        )
    counts = []
    for i, (n, t) in enumerate(zip(given, tensors, strict=True)):
        try:
            count = operator.index(None if isinstance(n, bool) else n)  # type: ignore[arg-type]
        except TypeError:
            raise ConfigError(
                f"send: rows[{i}] is {n!r:.80}, want an int from 0 to {rows_of(t)}"
            ) from None
        if not 0 <= count <= rows_of(t):
            raise ShapeError(f"send: rows[{i}] is {count}, but the tensor has {rows_of(t)} rows")
        counts.append(count)
    return counts


class Caller:
    """How the user of a side calls it: one thread at a time. This user may change the tensors as
    soon as a call returns, and the calls wait for a limited time."""

    def __init__(self, timeout_ms: float) -> None:
        self._timeout = timeout_ms
        self._end = 0.0
        self._call = ""
        self.busy = threading.RLock()  # held by a call, also while a signal handler calls again

    def alone(self, call: str, do: Callable[..., None], *args: Any) -> None:
        """Runs what a call does, unless another thread is in one."""
        if not self.busy.acquire(blocking=False):
            raise ConfigError(
                f"{call}: another thread is in a call of this channel (open a channel for each "
                "thread, or make one call at a time)"
            )
        try:
            do(*args)
        finally:
            self.busy.release()

    def staged(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the buffers from which the tensors are sent."""
        import torch

        return [torch.empty_like(t) for t in tensors]

    def counts(self, n: int) -> Tensor:
        """Returns a buffer for row counts."""
        import torch

        return torch.zeros(n, dtype=torch.int64)

    def begin(self, call: str) -> None:
        """Starts the clock of a wait in send or recv."""
        self._call = call
        self._end = time.monotonic() + self._timeout / 1000

    def slice_ms(self) -> float:
        """Returns how long to wait before the next call of check()."""
        return max(0.0, min(SLICE_MS, (self._end - time.monotonic()) * 1000))

    def check(self) -> None:
        """Raises the error that ends the wait, if there is one."""
        if time.monotonic() >= self._end:
            what = "no message came" if self._call == "recv" else "the peers did not receive"
            raise TimeoutError(
                f"{self._call}: {what} within timeout_ms={self._timeout:g}: call {self._call}() "
                "again to go on waiting"
            )


class Side:
    """The methods of a side, besides send, recv, rows and close, that Channel calls when the engine
    carries the messages. These defaults fit a side that completes its work within each call."""

    capturable = False  # whether its calls can be captured in a CUDA graph
    captured = False  # whether one has been: replays are not seen here, so calls have no order

    def check_error(self) -> None:
        """Raises the error that has ended the channel, unless the node reports it."""

    def finish(self) -> None:
        """Waits for the enqueued work, for a limited time."""


class WorkerSide(Side):
    """One side of a worker.

    Args:
        node: the extension's Worker.
        channel: its handle.
        push, pull: the tensors; pull server-major.
        servers: their number.
        caller: who calls.
    """

    def __init__(
        self,
        node: Any,
        channel: int,
        push: Sequence[Tensor],
        push_keys: Sequence[int],
        pull: Sequence[Tensor],
        pull_keys: Sequence[int],
        servers: int,
        caller: Caller,
    ) -> None:
        self._node, self._channel, self._caller = node, channel, caller
        self._push, self._push_keys = list(push), list(push_keys)
        self._staged = caller.staged(push)
        each = len(pull) // servers
        # Row counts come behind the tensors of each server.
        self._counts = [caller.counts(each) for _ in range(servers)]
        self._pull: list[Tensor] = []
        self._pull_keys: list[int] = []
        if each:
            for i in range(servers):
                mine = slice(i * each, (i + 1) * each)
                self._pull += [*pull[mine], self._counts[i]]
                self._pull_keys += [*pull_keys[mine], 0]
        self._handler: int | None = None

    def rows(self) -> list[Tensor]:
        return self._counts

    def _wait(self, call: str) -> None:
        """For the answer; ends early when a peer that has not given its own closes its side."""
        handler = self._handler  # a signal handler may close this side meanwhile
        if handler is None:
            return
        self._caller.begin(call)
        closed = False
        while True:
            try:
                self._node.wait(handler, self._caller.slice_ms())
                self._handler = None
                return
            except TimeoutError:
                self._caller.check()
            try:
                self._node.channel_awaits(self._channel, handler)
                closed = False
            except ClosedError:
                if closed:
                    raise
                closed = True  # what it sent before may still be on its way

    def send(self, rows: Sequence[int] | None = None) -> None:
        self._caller.alone("send", self._send, rows)

    def _send(self, rows: Sequence[int] | None) -> None:
        counts = check_rows(rows, self._push)
        self._wait("send")
        for t, staged, n in zip(self._push, self._staged, counts, strict=True):
            if t is not staged:
                copy_rows(staged, t, n)
        self._post([first_rows(s, n) for s, n in zip(self._staged, counts, strict=True)])

    def _post(self, push: list[Tensor]) -> None:
        keys = self._push_keys if push else []
        self._handler = self._node.channel_push_pull(
            self._channel, push, keys, self._pull, self._pull_keys
        )

    def recv(self) -> None:
        self._caller.alone("recv", self._recv)

    def _recv(self) -> None:
        if not self._push and self._handler is None:  # the server may write now
            self._post([])
        self._wait("recv")

    def close(self) -> None:
        """Waits for a call in another thread, which the end of the channel ends."""
        with self._caller.busy:
            self._handler = None


class ServerSide(Side):
    """One side of a server: takes the messages of all workers, and answers them.

    Args:
        node: the extension's Server.
        channel: its handle.
        into: for each worker, the tensors that come from it.
        out: for each worker, the tensors that go to it.
        caller: who calls.
    """

    def __init__(
        self,
        node: _C.Server,
        channel: int,
        into: Sequence[Sequence[Tensor]],
        out: Sequence[Sequence[Tensor]],
        caller: Caller,
    ) -> None:
        self._node, self._channel, self._caller = node, channel, caller
        self._into, self._out = [list(row) for row in into], [list(row) for row in out]
        self._outgoing = [t for row in out for t in row]
        self._staged = [caller.staged(row) for row in out]
        self._back = [caller.counts(len(row)) for row in out]
        self._counts = [caller.counts(len(row)) for row in into]
        self._handlers: list[int] = []

    def rows(self) -> list[Tensor]:
        return self._counts

    def _take(self, call: str) -> list[tuple[int, list[Tensor], list[int]]]:
        self._caller.begin(call)
        while not (batch := self._node.channel_take(self._channel, self._caller.slice_ms())):
            self._caller.check()
        self._handlers = [handler for handler, _, _ in batch]
        return batch

    def accept(self) -> None:
        """Has the next message in the tensors."""
        for i, (_, tensors, _) in enumerate(self._take("recv")):
            for j, (mine, got) in enumerate(zip(self._into[i], tensors, strict=True)):
                n = rows_of(got)
                # The plan of a message is its sender's: its shape is looked at again.
                if got.dtype != mine.dtype or n > rows_of(mine) or got.shape[1:] != mine.shape[1:]:
                    raise ShapeError(
                        f"recv: worker {i} sent {got.dtype} {list(got.shape)} for a tensor of "
                        f"{mine.dtype} {list(mine.shape)}: run the same version of fserver on both "
                        "sides"
                    )
                copy_rows(mine, got, n)
                self._counts[i][j] = n

    def answer(self, rows: Sequence[int]) -> None:
        """Sends so many rows of each tensor, and lets the workers go on."""
        counts = iter(rows)
        for i, handler in enumerate(self._handlers):
            back: list[Tensor] = []
            for j, (t, staged) in enumerate(zip(self._out[i], self._staged[i], strict=True)):
                n = next(counts)
                if t is not staged:
                    copy_rows(staged, t, n)
                self._back[i][j] = n
            if self._staged[i]:
                back = [*self._staged[i], self._back[i]]
            self._node.respond(back, handler)
        self._handlers = []

    def recv(self) -> None:
        self._caller.alone("recv", self._recv)

    def _recv(self) -> None:
        self.accept()
        if not self._outgoing:
            self.answer([])

    def send(self, rows: Sequence[int] | None = None) -> None:
        self._caller.alone("send", self._send, rows)

    def _send(self, rows: Sequence[int] | None) -> None:
        counts = check_rows(rows, self._outgoing)
        if not any(self._into):
            self._take("send")
        self.answer(counts)

    def close(self) -> None:
        """Waits for a call in another thread, which the end of the channel ends."""
        with self._caller.busy:
            self._handlers = []
