"""Channel: what Worker.channel and Server.channel return."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fserver.channel import describe
from fserver.channel.cpu import REOPEN, check_rows
from fserver.channel.parting import close_gpu
from fserver.channel.plan import TABLE, Table
from fserver.errors import ClosedError, ConfigError, Error, TimeoutError

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self


@dataclass(frozen=True)
class How:
    """The arguments of Worker.channel and Server.channel, except the tensors and keys."""

    mode: str
    name: str
    timeout_ms: float
    tune: bool
    table: Table = TABLE

    def trial(self, number: str, table: Table) -> How:
        """Returns the arguments of a trial channel, which tune.py opens to choose the table."""
        return replace(self, name=self.name + number, tune=False, table=table)


# Of cs_channel.h.
_LOST, _LATE, _BROKEN = 1, 2, 3

# How long close() waits for the other side to close too. Channels that are closed together share
# one such wait.
PARTING_S = 2.0

_numbers = itertools.count(1)
_open: weakref.WeakValueDictionary[int, Channel] = weakref.WeakValueDictionary()


def find(number: int) -> Channel:
    """Returns the open channel with this number, for torch.ops.fserver."""
    channel = _open.get(number)
    if channel is None:
        raise ClosedError(
            f"no open channel has number {number}: it is closed, or was never opened (pass "
            "channel.number)"
        )
    return channel


def captured(device: Any = None) -> bool:
    """Reports whether a stream is being captured into a CUDA graph: the current stream, or the
    current stream of ``device``."""
    import torch

    if not torch.cuda.is_available():
        return False
    if torch.cuda.is_current_stream_capturing():
        return True
    if device is None or torch.device(device).type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _explain(channel: weakref.ref[Channel], error: Exception | None = None) -> None:
    open_one = channel()
    if open_one is None:
        return
    if error is not None:
        open_one._fail(error)
    else:
        open_one.check()


def _refused(name: str, rows: Sequence[int] | None = None) -> None:
    """The send() and recv() of a closed channel."""
    raise ClosedError(f"channel {name!r} is closed")


def _drop(
    node: Any, handle: int, name: str, side: Any, path: str, on_close: Callable[[], None]
) -> None:
    """Ends a channel that was closed, or garbage-collected."""
    on_close()
    if path == "host":
        try:
            node.channel_close(handle, 0, "")
        finally:
            side.close()
    else:
        close_gpu(node, handle, name, side)


def close_all(channels: Iterable[Channel]) -> None:
    """Closes channels together: tells the peers of all channels, then waits for them. This takes
    about as long as closing the slowest of the channels."""
    leaving = [channel for channel in channels if channel._leave()]
    try:
        for channel in leaving:
            channel._side.finish()
    finally:  # whatever comes, as Ctrl-C may, nothing stays open
        end = time.monotonic() + PARTING_S
        with contextlib.ExitStack() as rest:
            for channel in reversed(leaving):
                rest.callback(channel._let_go, end)
            for channel in leaving:
                channel._say_closed()


class Channel:
    """One side of a stream channel. ``Worker.channel`` and ``Server.channel`` return it.

    With GPU tensors, ``send()`` and ``recv()`` enqueue work on the current stream and return at
    once. With CPU tensors, they transfer the data before they return. If a channel has tensors in
    both directions, the two calls alternate: the worker sends first, the server receives first. A
    channel belongs to one stream at a time, so two micro-batches need two channels. A channel is a
    context manager: leaving the ``with`` block closes it.

    Attributes:
        name: the name of the channel, the same on both sides.
        number: identifies the channel in calls of ``torch.ops.fserver``.
        outgoing: the tensors that ``send()`` sends. On a worker these are its push tensors, on a
            server its pull tensors.
        incoming: the tensors that ``recv()`` fills.
        tensors: the tensors of ``incoming``, one list for each peer. On a server,
            ``tensors[i][j]`` is tensor j of worker i.
        rows: for each peer, an int64 tensor on the device. It holds, for each tensor, the number
            of rows in the last message. The contents of the remaining rows are undefined.
        mode: ``"kernel"``, ``"copy"`` or ``"host"``: the mode with which the channel was opened.
        path: how messages travel. It is equal to ``mode``, or ``"host"`` if the GPUs cannot reach
            each other's memory or the tensors are on the CPU.
        reason: why ``path`` differs from ``mode``, for each peer. Empty if they are equal, or if
            all tensors are on the CPU.
        table: with path ``"kernel"``, how incoming tensors are transferred. Tensors of up to
            ``packets_up_to`` bytes are sent in packets. Larger tensors are copied by a number of
            CUDA blocks, which ``blocks`` gives by size.
        token: an int64 tensor on the device. It keeps the calls of ``torch.ops.fserver`` in order.
        closed: whether this side is closed.
    """

    def __init__(
        self,
        node: Any,
        handle: int,
        how: How,
        side: Any,
        path: str,
        reason: str,
        outgoing: Sequence[Tensor],
        tensors: Sequence[Sequence[Tensor]],
        device: Any,
        send_first: bool,
        on_close: Callable[[], None],
    ) -> None:
        import torch

        self._node, self._handle, self._side = node, handle, side
        self.name, self.mode, self.path, self.table = how.name, how.mode, path, how.table
        self.reason = reason
        self.outgoing = list(outgoing)
        self.tensors = [list(row) for row in tensors]
        self._count = len(self.tensors)  # of peers
        self.incoming = [t for row in tensors for t in row]
        everything = (*self.outgoing, *self.incoming)
        self._places = [(t, t.data_ptr(), t.shape, t.dtype) for t in everything]
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.rows: list[Tensor] = side.rows()
        self.closed = False
        self._peers = "server" if send_first else "worker"
        self._turns = bool(self.outgoing and self.incoming) and path == "host"
        self._sends_next = send_first
        if path != "host":
            for method, has in (("send", self.outgoing), ("recv", self.incoming)):
                if has:  # no frame of Python in between
                    setattr(self, method, getattr(side, method))
            side.explain(functools.partial(_explain, weakref.ref(self)))
        self.number = next(_numbers)
        _open[self.number] = self
        self._dropped = weakref.finalize(self, _drop, node, handle, how.name, side, path, on_close)
        self._dropped.atexit = False

    def send(self, rows: Sequence[int] | None = None) -> None:
        """Sends ``outgoing`` after the work that is already queued on the current stream. Does
        nothing if ``outgoing`` is empty.

        Args:
            rows: the number of rows of each tensor to send, in the order of ``outgoing``. None
                sends all rows. A CUDA graph keeps the numbers that were captured.

        Raises:
            ConfigError: ``recv`` has to be called first, another stream uses the channel, or the
                call cannot be captured.
            ShapeError: ``rows`` has the wrong length, or a number is too large.
            PeerLostError: a peer is lost. The channel has ended.
            ClosedError: this side or a peer has closed the channel.
            TimeoutError: an earlier wait took longer than ``timeout_ms``, and the channel has
                ended. With CPU tensors the channel has not ended: call again to go on waiting.
        """
        if not self._has("send", self.outgoing):
            check_rows(rows, self.outgoing)
            return
        self._enter("send", True)
        with self._explained():
            if self.path == "host" and self._side.capturable:  # the stream learns it later
                self._node.channel_state(self._handle)
            self._side.send(rows)
        self._sends_next = False

    def recv(self) -> None:
        """Makes the current stream wait for the next message of each peer, which fills
        ``incoming``. Does nothing if ``incoming`` is empty.

        After a ``send``, the contents of ``incoming`` are undefined until the next ``recv``.

        Raises:
            Error: as for ``send``.
        """
        if not self._has("recv", self.incoming):
            return
        self._enter("recv", False)
        with self._explained():
            self._side.recv()
        self._sends_next = True

    def _has(self, call: str, tensors: Sequence[Tensor]) -> bool:
        """Reports whether a call of this open channel transfers anything."""
        if self.closed:
            raise ClosedError(f"{call}: channel {self.name!r} is closed")
        return bool(tensors)

    def _enter(self, call: str, sends: bool) -> None:
        if self._turns and sends != self._sends_next and not self._side.captured:
            self.check()  # if a peer is lost, say that instead
            due = "recv" if sends else "send"
            raise ConfigError(
                f"{call}: call {due}() first: on a channel with tensors in both directions, "
                "send() and recv() alternate"
            )
        for t, place, shape, dtype in self._places:
            if t.data_ptr() != place:
                raise ConfigError(
                    f"{call}: a tensor of channel {self.name!r}, of shape {list(t.shape)}, has "
                    "lost its memory (by untyped_storage().resize_ or set_). Keep the memory while "
                    f"the channel is open, or {REOPEN}"
                )
            if t.shape != shape or t.dtype != dtype or not t.is_contiguous():
                raise ConfigError(
                    f"{call}: a tensor of channel {self.name!r} was {dtype} {list(shape)} when "
                    f"the channel was opened and is now {t.dtype} {list(t.shape)} with strides "
                    f"{list(t.stride())} (by resize_, t_ or .data): restore its dtype and shape; "
                    "to send fewer rows, use send(rows=[...])"
                )
        if not self._side.capturable and captured():
            raise ConfigError(
                f"{call}: channel {self.name!r} has CPU tensors and cannot be captured in a CUDA "
                "graph: call it outside the capture, or open a channel with GPU tensors"
            )

    def _fail(self, error: Exception) -> None:
        """Closes this side for the peers after a local failure, and tells them the reason."""
        self._node.channel_end(self._handle, describe.refusal(self.mode, error))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Adds to a ClosedError the reason for which the peer has closed its side, if it is
        known."""
        try:
            yield
        except ClosedError as error:
            raise self._parting() or error from None

    def _parting(self) -> ClosedError | None:
        for i in range(len(self.tensors)):
            try:
                theirs = describe.read(i, self._node.channel_text(self._handle, i, 0))
            except Error:  # the peer has never sent a text
                continue
            if "refused" in theirs:
                return ClosedError(
                    f"channel {self.name!r}: {self._peers} {i} has closed its side: "
                    f"{str(theirs['refused']):.400} (close this side and open a new channel)"
                )
        return None

    def check(self) -> None:
        """Raises an error if the channel has ended. Does not wait.

        Raises:
            PeerLostError: a peer is lost.
            TimeoutError: a stream has waited longer than ``timeout_ms`` for a peer.
            ClosedError: this side or a peer has closed the channel.
        """
        if self.closed:
            raise ClosedError(f"check: channel {self.name!r} is closed")
        if self.path != "host":
            reason, peer = self._side.status()
            if reason == _LATE:
                raise TimeoutError(
                    f"channel {self.name!r}: peer {peer} has not responded within timeout_ms of "
                    f"the channel, so the channel has ended ({REOPEN})"
                )
            if reason == _BROKEN:
                raise Error(
                    f"channel {self.name!r}: an earlier send or recv failed after a part of its "
                    f"message was enqueued, so the channel has ended ({REOPEN})"
                )
            with self._explained():
                self._node.channel_state(self._handle)
            if reason == _LOST:
                raise Error(
                    f"channel {self.name!r}: the channel ended while a stream waited for peer "
                    f"{peer} ({REOPEN})"
                )
            return
        with self._explained():
            self._side.check_error()
            self._node.channel_state(self._handle)

    def close(self) -> None:
        """Closes this side after the queued work has run. Waits at most 2 s for the peers to close
        their sides.

        Later calls of the peers raise ClosedError. ``close`` does nothing if this side is closed
        already.
        """
        close_all([self])

    def _leave(self) -> bool:
        """Makes further calls fail. Reports whether the channel was open."""
        if self.closed:
            return False
        self.closed = True
        _open.pop(self.number, None)
        if self.path != "host":
            for method in ("send", "recv"):  # without a reference to self, which would be a cycle
                setattr(self, method, functools.partial(_refused, self.name))
        return True

    def _say_closed(self) -> None:
        """Tells the peers, without waiting for them."""
        if self.path == "host":
            return
        with contextlib.suppress(Error):  # the node is closed, and its peers know
            self._node.channel_end(self._handle, "")

    def _let_go(self, end: float) -> None:
        """Waits for the peers until ``end``, a time of the monotonic clock, and drops all
        resources."""
        try:
            if self.path != "host":
                wait_ms = max(0.0, end - time.monotonic()) * 1e3
                self._node.channel_close(self._handle, wait_ms, "", False)
        finally:
            self.outgoing, self.incoming, self.tensors, self.rows = [], [], [], []
            self._places = []
            self._dropped()  # what is left of it: the keys are free

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        us, rank = ("worker" if self._peers == "server" else "server"), self._node.rank
        with_whom = f"{self._count} {self._peers}{'s' * (self._count != 1)}"
        way = self.mode if self.mode == self.path else f"{self.mode} (by way of {self.path})"
        state = "closed" if self.closed else "open"
        return f"<fserver.Channel {self.name!r} of {us} {rank} with {with_whom}: {way}, {state}>"
