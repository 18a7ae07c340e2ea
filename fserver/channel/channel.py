"""Channel: what Worker.channel and Server.channel give."""

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
from fserver.channel.plan import TABLE, Table
from fserver.errors import ClosedError, ConfigError, Error, TimeoutError

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self


@dataclass(frozen=True)
class How:
    """What a channel is opened with, besides its tensors; see Worker.channel."""

    mode: str
    name: str
    timeout_ms: float
    tune: bool
    table: Table = TABLE

    def trial(self, number: str, table: Table) -> How:
        """One of those that find the table."""
        return replace(self, name=self.name + number, tune=False, table=table)


# Of cs_channel.h.
_LOST, _LATE, _BROKEN = 1, 2, 3

# How long close() waits for the other side to close too. Of several channels that are closed
# together, all wait for the same time.
_PARTING_S = 2.0

_numbers = itertools.count(1)
_open: weakref.WeakValueDictionary[int, Channel] = weakref.WeakValueDictionary()


def find(number: int) -> Channel:
    """The open channel of a number, for torch.ops.fserver."""
    channel = _open.get(number)
    if channel is None:
        raise ClosedError(f"channel {number}: it is closed, or there never was one")
    return channel


def captured(device: Any = None) -> bool:
    """Whether the current stream, or that of another device, is being captured into a graph."""
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


def part(node: Any, handle: int, side: Any, wait_s: float = _PARTING_S, why: str = "") -> None:
    """Closes the side of a GPU: behind the engine's, which sets its word, and behind those of the
    peers, which may write to its memory until then."""
    try:
        node.channel_close(handle, wait_s * 1e3, why)
    finally:
        side.close()


def _drop(node: Any, handle: int, side: Any, path: str, on_close: Callable[[], None]) -> None:
    """Ends a channel that nobody has closed."""
    on_close()
    if path == "host":
        side.stop()
        node.channel_close(handle, 0, "")
    else:
        part(node, handle, side, 0)


def close_all(channels: Iterable[Channel]) -> None:
    """Closes channels together: all peers are told before any is waited for. It takes about as long
    as to close the slowest of them."""
    leaving = [channel for channel in channels if channel._leave()]
    try:
        for channel in leaving:
            channel._side.finish()
    finally:  # whatever comes, as Ctrl-C may, nothing stays open
        end = time.monotonic() + _PARTING_S
        with contextlib.ExitStack() as rest:
            for channel in reversed(leaving):
                rest.callback(channel._let_go, end)
            for channel in leaving:
                channel._say_closed()


class Channel:
    """One side of a stream channel, as ``Worker.channel`` and ``Server.channel`` return it.

    ``send()`` and ``recv()`` enqueue on the current stream and return at once; with CPU tensors
    they make the exchange themselves. On a channel with tensors both ways the two calls
    alternate: the worker sends first, the server receives first. A channel belongs to one stream
    at a time; two micro-batches use two channels. It is a context manager: leaving the block
    closes it.

    Attributes:
        name: what both sides call the channel.
        number: names the channel in ``torch.ops.fserver``.
        outgoing: the tensors that ``send()`` sends: on a worker its push tensors, on a server its
            pull tensors.
        incoming: the tensors that ``recv()`` fills.
        tensors: ``incoming`` by peer: on a server ``tensors[i][j]`` is tensor j of worker i.
        rows: for each peer an int64 tensor on the device: how many rows of each tensor the last
            message had. The rows behind them are undefined.
        mode: ``"kernel"``, ``"copy"`` or ``"host"``, as the channel was opened.
        path: how messages travel: as the mode says, or ``"host"`` where the GPUs cannot reach
            each other or the tensors are on the CPU.
        reason: why ``path`` is not ``mode``, for each peer; empty if it is, or if all tensors are
            on the CPU.
        table: with path ``"kernel"``, how incoming tensors are written, by size: in packets up to
            ``packets_up_to`` bytes, above that by a number of ``blocks``.
        token: an int64 tensor on the device, which orders the calls in ``torch.ops.fserver``.
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
        if path != "host":  # no frame of Python in between
            for method in ("send", "recv"):
                setattr(self, method, getattr(side, method))
            side.explain(functools.partial(_explain, weakref.ref(self)))
        self.number = next(_numbers)
        _open[self.number] = self
        self._dropped = weakref.finalize(self, _drop, node, handle, side, path, on_close)
        self._dropped.atexit = path == "host"  # a thread that is to end

    def send(self, rows: Sequence[int] | None = None) -> None:
        """Sends ``outgoing`` after all that is queued on the current stream.

        Args:
            rows: how many rows of each tensor to send, in the order of ``outgoing``; None: all.
                Inside a graph the numbers stay as they were captured.

        Raises:
            ConfigError: it is the turn of ``recv``, the channel is in use on another stream, or the
                call cannot be captured.
            ShapeError: rows do not fit.
            PeerLostError: a peer is gone, and the channel has ended.
            ClosedError: this side or a peer has closed the channel.
            TimeoutError: an earlier wait took longer than ``timeout_ms``, and the channel has
                ended. With CPU tensors it has not: call again to go on waiting.
        """
        self._enter("send", True)
        with self._explained():
            if self.path == "host" and self._side.capturable:  # by a thread, which learns it later
                self._node.channel_state(self._handle)
            self._side.send(rows)
        self._sends_next = False

    def recv(self) -> None:
        """Makes the current stream wait for the peers' message, and fills ``incoming`` with it.

        Between a ``send`` and the ``recv`` that follows, the contents of ``incoming`` are
        undefined.

        Raises:
            Error: the errors of ``send``.
        """
        self._enter("recv", False)
        with self._explained():
            self._side.recv()
        self._sends_next = True

    def _enter(self, call: str, sends: bool) -> None:
        if self.closed:
            raise ClosedError(f"{call}: channel {self.name!r} is closed")
        if self._turns and sends != self._sends_next:
            self.check()  # without its peer it is nobody's turn
            raise ConfigError(
                f"{call}: it is the turn of {'recv' if sends else 'send'}(): on a channel with "
                "tensors both ways the two alternate"
            )
        for t, place, shape, dtype in self._places:
            if t.data_ptr() != place:
                raise ConfigError(
                    f"{call}: a tensor of channel {self.name!r}, of shape {list(t.shape)}, has "
                    "lost its memory (untyped_storage().resize_, set_): keep it while the channel "
                    "is open, or close the channel and open another"
                )
            if t.shape != shape or t.dtype != dtype or not t.is_contiguous():
                raise ConfigError(
                    f"{call}: a tensor of channel {self.name!r}, of {dtype} {list(shape)} when it "
                    f"was opened, has become one of {t.dtype} {list(t.shape)} and strides "
                    f"{list(t.stride())} (resize_, t_, .data): make it what it was, or send fewer "
                    "rows with send(rows=[...])"
                )
        if not self._side.capturable and captured():
            raise ConfigError(
                f"{call}: a channel of CPU tensors cannot be captured in a graph (channel "
                f"{self.name!r}): call it outside, or open a channel of GPU tensors"
            )

    def _fail(self, error: Exception) -> None:
        """Tells the peers that this side has ended by itself, as if it were closed, and why."""
        self._node.channel_end(self._handle, describe.refusal(self.mode, error))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Has a ClosedError say why a peer has closed its side, if that peer has said so."""
        try:
            yield
        except ClosedError as error:
            raise self._parting() or error from None

    def _parting(self) -> ClosedError | None:
        for i in range(len(self.tensors)):
            try:
                theirs = describe.read(i, self._node.channel_text(self._handle, i, 0))
            except Error:  # it has never told anything
                continue
            if "refused" in theirs:
                return ClosedError(
                    f"channel {self.name!r}: {self._peers} {i} has closed its side: "
                    f"{str(theirs['refused']):.400} (close this side and open a new channel)"
                )
        return None

    def check(self) -> None:
        """Reports by an error whether the channel has ended, without waiting.

        Raises:
            PeerLostError: a peer is gone.
            TimeoutError: a stream has waited for a peer for longer than ``timeout_ms``.
            ClosedError: a peer, or this side, has closed the channel.
        """
        if self.closed:
            raise ClosedError(f"check: channel {self.name!r} is closed")
        if self.path != "host":
            reason, peer = self._side.status()
            if reason == _LATE:
                raise TimeoutError(
                    f"channel {self.name!r}: peer {peer} has sent nothing for the time-out of the "
                    "channel: it has ended (close it and open another)"
                )
            if reason == _BROKEN:
                raise Error(
                    f"channel {self.name!r}: a send or recv failed half-way: it has ended (close "
                    "it and open another)"
                )
            with self._explained():
                self._node.channel_state(self._handle)
            if reason == _LOST:
                raise Error(f"channel {self.name!r}: it was ended while it waited for peer {peer}")
            return
        with self._explained():
            self._side.check_error()
            self._node.channel_state(self._handle)

    def close(self) -> None:
        """Closes this side after what is queued, and waits at most 2 s for the peers to close
        theirs.

        The peers get a ClosedError for what they send or wait for afterwards. Does nothing if the
        channel is closed.
        """
        close_all([self])

    def _leave(self) -> bool:
        """Refuses further calls. Reports whether the channel was open."""
        if self.closed:
            return False
        self.closed = True
        _open.pop(self.number, None)
        if self.path != "host":
            for method in ("send", "recv"):
                setattr(self, method, self._refuse)
        return True

    def _say_closed(self) -> None:
        """Tells the peers, and the thread of the channel if it has one, and waits for none."""
        if self.path == "host":
            self._side.stop()
            return
        with contextlib.suppress(Error):  # the node is closed, and its peers know
            self._node.channel_end(self._handle, "")

    def _let_go(self, end: float) -> None:
        """Waits for the peers, until a time of the monotonic clock, and lets go of everything."""
        try:
            if self.path == "host":
                self._side.close()
            else:
                part(self._node, self._handle, self._side, max(0.0, end - time.monotonic()))
        finally:
            self._dropped()  # what is left of it: the keys are free
            self.outgoing, self.incoming, self.tensors, self.rows = [], [], [], []
            self._places = []

    def _refuse(self, rows: Sequence[int] | None = None) -> None:
        raise ClosedError(f"channel {self.name!r} is closed")

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
