"""The side of a channel whose messages the engine carries: for CPU tensors, and for GPUs that
cannot reach each other, whose calls wait for the copies on the current stream. A message from the
worker is a push_pull on the channel, and what comes back its answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fserver.errors import ClosedError, ShapeError, TimeoutError

if TYPE_CHECKING:
    from torch import Tensor


# Between two looks at whether a peer has closed its side.
_SLICE_MS = 200.0


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Memory like that of tensors, on the CPU."""
    import torch

    return [torch.empty(t.shape, dtype=t.dtype) for t in tensors]


def part(tensor: Tensor, rows: int) -> Tensor:
    """The first rows of a tensor; one without dimensions is one row."""
    return tensor[:rows] if tensor.dim() else tensor.reshape(1)[:rows]


def rows_of(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def check_rows(rows: Sequence[int] | None, tensors: Sequence[Tensor]) -> list[int]:
    """A number of rows for each tensor.

    Raises:
        ShapeError: there are not as many, or one is more than its tensor has.
    """
    if rows is None:
        return [rows_of(t) for t in tensors]
    if len(rows) != len(tensors):
        raise ShapeError(
            f"send: rows has {len(rows)} numbers for {len(tensors)} tensors: give one for each"
        )
    for i, (n, t) in enumerate(zip(rows, tensors, strict=True)):
        if not 0 <= n <= rows_of(t):
            raise ShapeError(f"send: rows[{i}] is {n}, and the tensor has {rows_of(t)}")
    return list(rows)


class WorkerSide:
    """Sends what it has copied, so that the caller may change its tensors at once.

    Args:
        node: the extension's Worker.
        channel: its handle.
        push, pull: the tensors; pull server-major.
        servers: their number.
        timeout_ms: how long a call waits.
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
        timeout_ms: float,
    ) -> None:
        import torch

        self._node, self._channel, self._timeout = node, channel, timeout_ms
        self._push, self._push_keys = list(push), list(push_keys)
        self._staged = copies(push)
        self._each = len(pull) // servers
        # Row counts come behind the tensors of each server.
        self._counts = [torch.zeros(self._each, dtype=torch.int64) for _ in range(servers)]
        # What comes for a GPU lands here first.
        self._gpu_pull = [t for t in pull if t.is_cuda]
        self._landing = copies(self._gpu_pull)
        pull = self._landing or pull
        self._pull: list[Tensor] = []
        self._pull_keys: list[int] = []
        if self._each:
            for i in range(servers):
                mine = slice(i * self._each, (i + 1) * self._each)
                self._pull += [*pull[mine], self._counts[i]]
                self._pull_keys += [*pull_keys[mine], 0]
        self._handler: int | None = None
        self._posted = 0.0

    def rows(self) -> list[Tensor]:
        return self._counts

    def _wait(self) -> None:
        if self._handler is not None:
            _until(self._node, self._channel, self._handler, self._posted, self._timeout)
            self._handler = None

    def send(self, rows: Sequence[int] | None = None) -> None:
        counts = check_rows(rows, self._push)
        self._wait()
        for t, staged, n in zip(self._push, self._staged, counts, strict=True):
            part(staged, n).copy_(part(t, n))
        views = [part(s, n) for s, n in zip(self._staged, counts, strict=True)]
        self._post(views)

    def _post(self, push: list[Tensor]) -> None:
        keys = self._push_keys if push else []
        self._handler = self._node.channel_push_pull(
            self._channel, push, keys, self._pull, self._pull_keys
        )
        self._posted = time.monotonic()

    def recv(self) -> None:
        if not self._push:  # the server may write now
            self._post([])
        self._wait()
        for t, landed in zip(self._gpu_pull, self._landing, strict=True):
            t.copy_(landed)

    def close(self) -> None:
        self._handler = None


class ServerSide:
    """Takes the messages of all workers, and answers them.

    Args:
        node: the extension's Server.
        channel: its handle.
        into: for each worker, the tensors that come from it.
        out: for each worker, the tensors that go to it.
        timeout_ms: how long a call waits.
    """

    def __init__(
        self,
        node: Any,
        channel: int,
        into: Sequence[Sequence[Tensor]],
        out: Sequence[Sequence[Tensor]],
        timeout_ms: float,
    ) -> None:
        import torch

        self._node, self._channel, self._timeout = node, channel, timeout_ms
        self._into, self._out = [list(row) for row in into], [list(row) for row in out]
        self._staged = [copies(row) for row in out]
        self._back = [torch.zeros(len(row), dtype=torch.int64) for row in out]
        self._counts = [torch.zeros(len(row), dtype=torch.int64) for row in into]
        self._handlers: list[int] = []

    def rows(self) -> list[Tensor]:
        return self._counts

    def _take(self) -> list[Any]:
        batch = self._node.channel_take(self._channel, self._timeout)
        if not batch:
            raise TimeoutError(f"recv: no message of all workers within {self._timeout:g} ms")
        self._handlers = [handler for handler, _, _ in batch]
        return batch

    def recv(self) -> None:
        for i, (_, tensors, _) in enumerate(self._take()):
            for j, (mine, got) in enumerate(zip(self._into[i], tensors, strict=True)):
                n = rows_of(got)
                # The plan of a message is its sender's: its shape is looked at again.
                if got.dtype != mine.dtype or n > rows_of(mine) or got.shape[1:] != mine.shape[1:]:
                    raise ShapeError(
                        f"recv: worker {i} sent {got.dtype} {list(got.shape)} for a tensor of "
                        f"{mine.dtype} {list(mine.shape)}"
                    )
                part(mine, n).copy_(got.reshape(part(mine, n).shape))
                self._counts[i][j] = n
        if not any(self._out):
            self._answer()

    def send(self, rows: Sequence[int] | None = None) -> None:
        flat = [t for row in self._out for t in row]
        counts = check_rows(rows, flat)
        if not any(self._into):
            self._take()
        at = 0
        for row, staged, back in zip(self._out, self._staged, self._back, strict=True):
            for j, (t, s) in enumerate(zip(row, staged, strict=True)):
                n = counts[at]
                part(s, n).copy_(part(t, n))
                back[j] = n
                at += 1
        self._answer()

    def _answer(self) -> None:
        for i, handler in enumerate(self._handlers):
            answer = [*self._staged[i], self._back[i]] if self._staged[i] else []
            self._node.respond(answer, handler)
        self._handlers = []

    def close(self) -> None:
        self._handlers = []


def _until(node: Any, channel: int, handler: int, posted: float, timeout_ms: float) -> None:
    """Waits for a push_pull; ends early when a peer has closed its side. wait() counts from the
    push_pull, so it is given the time since then as well."""
    end = time.monotonic() + timeout_ms / 1000
    closed: ClosedError | None = None
    while True:
        try:
            node.wait(handler, (time.monotonic() - posted) * 1000 + _SLICE_MS)
            return
        except TimeoutError as late:
            if closed is not None:
                raise closed from late
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"recv: nothing has come within {timeout_ms:g} ms: call again to go on waiting"
                ) from late
        try:
            node.channel_state(channel)
        except ClosedError as error:
            closed = error  # what it sent before may still be on its way
