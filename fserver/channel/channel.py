"""Channel: what Worker.channel and Server.channel give."""

from __future__ import annotations

import contextlib
import functools
import itertools
import platform
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fserver.channel import describe
from fserver.channel.cpu import Caller, ServerSide, WorkerSide
from fserver.channel.plan import TABLE, Table
from fserver.channel.stream import Gpu, StreamSide
from fserver.channel.tune import tuned
from fserver.errors import ClosedError, ConfigError, Error, ShapeError, TimeoutError

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

# Of cs_channel.h.
_LOST, _LATE, _BROKEN = 1, 2, 3

# How long close() waits for the other side to close too.
_PARTING_MS = 2000.0

_numbers = itertools.count(1)
_open: weakref.WeakValueDictionary[int, Channel] = weakref.WeakValueDictionary()


def find(number: int) -> Channel:
    """The open channel of a number, for torch.ops.fserver."""
    channel = _open.get(number)
    if channel is None:
        raise ClosedError(f"channel {number}: it is closed, or there never was one")
    return channel


def _place(device: Any) -> str:
    """Equal for GPUs that may be able to reach each other."""
    if device.type != "cuda":
        return "cpu"
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"cuda@{boot.read_text().strip() if boot.exists() else platform.node()}"


def _captured(device: Any = None) -> bool:
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


def _outside(device: Any) -> None:
    """Opening allocates and waits, which a graph cannot replay. To be asked before a peer is told,
    which would wait for the rest.

    Raises:
        ConfigError: the current stream, or that of the tensors' device, is being captured.
    """
    if _captured(device):
        raise ConfigError(
            "channel: the current stream is being captured into a CUDA graph, which opening a "
            "channel cannot be part of: open the channel before the capture"
        )


def _direct(mode: str, device: Any) -> bool:
    """Whether GPUs may do it all."""
    return mode != "proxy" and device.type == "cuda"


def _explain(channel: weakref.ref[Channel], error: Exception | None = None) -> None:
    open_one = channel()
    if open_one is None:
        return
    if error is not None:
        open_one._fail(error)
    else:
        open_one.check()


def _part(node: Any, handle: int, side: Any, wait_ms: float = _PARTING_MS, why: str = "") -> None:
    """Closes the side of a GPU: behind the engine's, which sets its word, and behind those of the
    peers, which may write to its memory until then."""
    try:
        node.channel_close(handle, wait_ms, why)
    finally:
        side.close()


def _drop(node: Any, handle: int, side: Any, path: str, on_close: Callable[[], None]) -> None:
    """Ends a channel that nobody has closed."""
    on_close()
    if path == "cpu":
        side.stop()
        node.channel_close(handle, 0, "")
    else:
        _part(node, handle, side, 0)


class Channel:
    """One side of a stream channel. Made by ``Worker.channel`` and ``Server.channel``.

    ``send()`` and ``recv()`` enqueue on the current stream and return at once (with CPU tensors,
    they do it). A channel with tensors both ways goes in turn: the worker sends and receives, the
    server receives and sends. It belongs to one stream at a time; two micro-batches use two
    channels. A context manager: leaving the block closes it.

    Attributes:
        name: what both sides call it.
        number: names it in ``torch.ops.fserver``.
        outgoing: the tensors that ``send()`` sends: the worker's push, the server's pull tensors.
        incoming: those that ``recv()`` fills.
        tensors: ``incoming`` by peer: on a server ``tensors[i][j]`` is tensor j of worker i.
        rows: for each peer an int64 tensor, on the device: how many rows of each tensor the last
            message had. Rows behind them hold anything.
        mode: ``"sm"``, ``"ce"`` or ``"proxy"``, as it was opened.
        path: how messages travel: as the mode says, or ``"cpu"`` through the engine.
        table: on the path ``"sm"``, how what comes is written here, by its size: in packets up to
            ``packets_up_to`` bytes, above that by so many ``blocks``.
        token: an int64 tensor on the device for ``torch.ops.fserver``, which orders the calls.
    """

    def __init__(
        self,
        node: Any,
        handle: int,
        name: str,
        mode: str,
        side: Any,
        path: str,
        outgoing: Sequence[Tensor],
        tensors: Sequence[Sequence[Tensor]],
        device: Any,
        send_first: bool,
        on_close: Callable[[], None],
        table: Table,
    ) -> None:
        import torch

        self._node, self._handle, self._side = node, handle, side
        self.name, self.mode, self.path, self.table = name, mode, path, table
        self.outgoing = list(outgoing)
        self.tensors = [list(row) for row in tensors]
        self.incoming = [t for row in tensors for t in row]
        everything = (*self.outgoing, *self.incoming)
        self._places = [(t, t.data_ptr(), t.shape, t.dtype) for t in everything]
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.rows: list[Tensor] = side.rows()
        self.closed = False
        self._peers = "server" if send_first else "worker"
        self._turns = bool(self.outgoing and self.incoming) and path == "cpu"
        self._sends_next = send_first
        if path != "cpu":  # no frame of Python in between
            for method in ("send", "recv"):
                setattr(self, method, getattr(side, method))
            side.explain(functools.partial(_explain, weakref.ref(self)))
        self.number = next(_numbers)
        _open[self.number] = self
        self._dropped = weakref.finalize(self, _drop, node, handle, side, path, on_close)
        self._dropped.atexit = path == "cpu"  # a thread that is to end

    def send(self, rows: Sequence[int] | None = None) -> None:
        """Sends ``outgoing`` after all that is queued on the current stream.

        Args:
            rows: how many rows of each tensor, in the order of ``outgoing``; None: all. Inside a
                graph they stay as they were when it was captured.

        Raises:
            ConfigError: it is not the turn of send, the channel is in use on another stream, or
                the call cannot be captured.
            ShapeError: rows do not fit.
            PeerLostError, TimeoutError, ClosedError: the channel has ended.
        """
        self._enter("send", True)
        with self._explained():
            if self.path == "cpu" and self._side.capturable:  # by a thread, which learns it later
                self._node.channel_state(self._handle)
            self._side.send(rows)
        self._sends_next = False

    def recv(self) -> None:
        """Has what is queued on the current stream from now on wait for the peers' message, which
        is then in ``incoming``. Between a send and the recv that follows, what is in there is
        undefined.

        Raises:
            As send.
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
        if not self._side.capturable and _captured():
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
                    f"{str(theirs['refused']):.400} (close this one and open another)"
                )
        return None

    def check(self) -> None:
        """Says whether the channel still stands, without waiting.

        Raises:
            PeerLostError: a peer is gone.
            TimeoutError: a stream has waited for a peer for longer than ``timeout_ms``.
            ClosedError: a peer, or this side, has closed the channel.
        """
        if self.closed:
            raise ClosedError(f"check: channel {self.name!r} is closed")
        if self.path != "cpu":
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
        """Ends the channel on this side, after what is queued; bounded. The other side gets a
        ClosedError for what it sends or waits for afterwards. Does nothing if it is closed."""
        if self.closed:
            return
        self.closed = True
        _open.pop(self.number, None)
        if self.path != "cpu":
            for method in ("send", "recv"):
                setattr(self, method, self._refuse)
        try:
            self._side.finish()
        finally:  # whatever comes, as Ctrl-C may, nothing stays open
            try:
                if self.path == "cpu":
                    self._side.close()
                else:
                    _part(self._node, self._handle, self._side)
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
        state = "closed" if self.closed else self.path
        return f"<fserver.Channel {self.name!r} {state}>"


class Opener:
    """Opens the channels of one node: gives them names, and keeps their keys apart."""

    def __init__(self, node: Any) -> None:
        self._node = node  # the extension's Worker or Server
        self._lock = threading.Lock()  # of the next two
        self._next = 0  # number of a channel without a name
        self._given_back: set[int] = set()  # those below it that are free
        self._keys: set[int] = set()
        self._all: weakref.WeakSet[Channel] = weakref.WeakSet()

    def close(self) -> None:
        for channel in list(self._all):
            channel.close()

    @contextlib.contextmanager
    def called(self, name: str | None) -> Iterator[str]:
        """What a channel is called that is opened meanwhile. One without a name has the lowest
        number that none has; if opening fails, which it may on one side first, the next one has it
        again: so the two sides meet however often each has tried.

        Raises:
            ConfigError: name is none that the other side can be told.
        """
        if name is not None:
            yield describe.name(name)
            return
        with self._lock:
            number = min(self._given_back, default=self._next)
            self._given_back.discard(number)
            self._next = max(self._next, number + 1)
        try:
            yield str(number)
        except BaseException:
            with self._lock:
                self._given_back.add(number)
            raise

    def _hear(self, handle: int, called: str, peer: int, timeout_ms: float) -> dict[str, Any]:
        """What a peer tells of its side."""
        try:
            return describe.read(peer, self._node.channel_text(handle, peer, timeout_ms))
        except TimeoutError as late:
            raise TimeoutError(
                f"{late}: on this side the channel is called {called!r}: call channel() on both "
                "sides with the same name=, or in the same order if without one"
            ) from None

    def _begin(self, called: str, mode: str, push_keys: Sequence[int]) -> int:
        if mode not in describe.MODES:
            raise ConfigError(f"channel: mode is {mode!r}, want one of {', '.join(describe.MODES)}")
        if len(set(push_keys)) != len(push_keys):
            raise ConfigError("channel: push_keys has a key twice: give each tensor its own")
        taken = self._keys.intersection(push_keys)
        if taken:
            raise ConfigError(
                f"channel: key {min(taken)} is that of another open channel of this node: give "
                "each channel keys of its own"
            )
        handle: int = self._node.channel_open(called)
        self._keys.update(push_keys)
        return handle

    def _refuse(self, handle: int, mode: str, peers: Iterable[int], error: BaseException) -> None:
        """Tells peers that wait for this side's description why there is none. One that does not
        wait any more may open its side again, and would take it for that one's."""
        for i in peers:
            with contextlib.suppress(Error):
                self._node.channel_tell(handle, i, describe.refusal(mode, error))

    def _end(self, handle: int, keys: Sequence[int], side: Any, why: str = "") -> None:
        self._keys.difference_update(keys)
        if side:
            _part(self._node, handle, side, why=why)
        else:
            self._node.channel_close(handle, 0, why)

    def worker(
        self,
        push: Sequence[Tensor],
        push_keys: Sequence[int],
        pull: Sequence[Tensor],
        pull_keys: Sequence[int],
        mode: str,
        called: str,
        timeout_ms: float,
        tune: bool,
        table: Table = TABLE,
    ) -> Channel:
        push = describe.listed("push", push, "tensors")
        pull = describe.listed("pull", pull, "tensors")
        push_keys = describe.listed("push_keys", push_keys, "ints")
        pull_keys = describe.listed("pull_keys", pull_keys, "ints")
        describe.check("channel", "push", push, push_keys, False)
        describe.check("channel", "pull", pull, pull_keys, True)
        everything = [*push, *pull]
        if not everything:
            raise ShapeError("channel: push and pull are both empty: give at least one tensor")
        device = everything[0].device
        if any(t.device != device for t in everything):
            raise ConfigError("channel: push and pull tensors are on different devices")
        _outside(device)
        if tune and mode == "sm":

            def trial(number: str, table: Table) -> Channel:
                some, name = (_like(push), _like(pull)), called + number
                return self.worker(
                    some[0], push_keys, some[1], pull_keys, mode, name, timeout_ms, False, table
                )

            table = tuned(trial, True)
        servers = self._node.servers
        if len(push_keys) != len(push):
            raise ShapeError(f"channel: {len(push_keys)} push_keys for {len(push)} push tensors")
        if len(pull) % servers:
            raise ShapeError(
                f"channel: {len(pull)} pull tensors, which {servers} servers do not divide: give "
                "pull[i*Q + j], tensor j of Q from server i"
            )
        each = len(pull) // servers
        if len(pull_keys) not in (len(pull), each):
            raise ShapeError(
                f"channel: {len(pull_keys)} pull_keys for {len(pull)} pull tensors of {servers} "
                f"servers: give {len(pull)} or {each}"
            )
        pull_keys *= 1 if len(pull_keys) == len(pull) else servers
        handle = self._begin(called, mode, push_keys)
        side: Any = None
        told = 0
        try:
            shares = [list(pull[i * each : (i + 1) * each]) for i in range(servers)]
            if _direct(mode, device):
                side = _gpu(device, mode, [list(push)] * servers, shares, True, timeout_ms, table)
                self._node.channel_watch(handle, side.abort_word)
            out = [describe.of(t, k) for t, k in zip(push, push_keys, strict=True)]
            for i in range(servers):
                keys = pull_keys[i * each : (i + 1) * each]
                into = [describe.of(t, k) for t, k in zip(shares[i], keys, strict=True)]
                more = {"gpu": side.describe(i)} if side else {}
                text = describe.text(mode, _place(device), out, into, **more)
                self._node.channel_tell(handle, i, text)
                told += 1
            paths, plans = set(), []
            for i in range(servers):
                theirs = self._hear(handle, called, i, timeout_ms)
                if "refused" in theirs:
                    raise describe.refused(f"server {i}", theirs)
                keys = pull_keys[i * each : (i + 1) * each]
                into = [describe.of(t, k) for t, k in zip(shares[i], keys, strict=True)]
                _same(i, mode, theirs, out, into)
                paths.add(theirs.get("path"))
                plans.append(theirs.get("gpu"))
            if len(paths) > 1:
                raise ConfigError(
                    "channel: the GPU can reach some servers and others not: open a channel "
                    "of CPU tensors"
                )
            path = paths.pop()
            if path == "cpu":
                if side:
                    self._node.channel_watch(handle, 0)
                    side.close()
                    side = None

                def make(out: Any, into: Any, caller: Caller) -> WorkerSide:
                    return WorkerSide(
                        self._node, handle, out, push_keys, into, pull_keys, servers, caller
                    )

                side = _carried(device, push, pull, make, timeout_ms)
            elif path == mode and side:
                side.attach(plans)
            else:
                raise Error("channel: a server wants a path that this side has not")
            return self._made(
                handle, called, mode, side, path, push, shares, push_keys, device, True, table
            )
        except BaseException as error:
            self._refuse(handle, mode, range(told, servers), error)
            self._end(handle, push_keys, side, describe.lasting(mode, error))
            raise

    def server(
        self,
        push_keys: Sequence[int],
        pull: Sequence[Tensor],
        pull_keys: Sequence[int],
        push: Sequence[Tensor] | None,
        mode: str,
        called: str,
        device: Any,
        timeout_ms: float,
        tune: bool,
        table: Table = TABLE,
    ) -> Channel:
        import torch

        pull = describe.listed("pull", pull, "tensors")
        push_keys = describe.listed("push_keys", push_keys, "ints")
        pull_keys = describe.listed("pull_keys", pull_keys, "ints")
        push = None if push is None else describe.listed("push", push, "tensors")
        device = describe.device(device)
        describe.check("channel", "pull", pull, pull_keys, False)
        describe.check("channel", "push", push or [], push_keys, True)
        given = [*(push or []), *pull]
        if len({t.device for t in given}) > 1:
            raise ConfigError("channel: push and pull tensors are on different devices")
        _outside(given[0].device if given else device)
        if tune and mode == "sm":

            def trial(number: str, table: Table) -> Channel:
                some, name = (_like(pull), _like(push)), called + number
                return self.server(
                    push_keys, some[0], pull_keys, some[1], mode, name, device, timeout_ms,
                    False, table,
                )  # fmt: skip

            table = tuned(trial, False)
        workers = self._node.workers
        if len(pull) % workers:
            raise ShapeError(
                f"channel: {len(pull)} pull tensors, which {workers} workers do not divide: give "
                "pull[i*Q + j], tensor j of Q for worker i"
            )
        each, n = len(pull) // workers, len(push_keys)
        if len(pull_keys) not in (len(pull), each):
            raise ShapeError(
                f"channel: {len(pull_keys)} pull_keys for {len(pull)} pull tensors of {workers} "
                f"workers: give {len(pull)} or {each}"
            )
        pull_keys *= 1 if len(pull_keys) == len(pull) else workers
        if push is not None and len(push) != n * workers:
            raise ShapeError(
                f"channel: {len(push)} push tensors for {n} push_keys of {workers} workers: give "
                f"{n * workers}, those of worker 0 first"
            )
        if n + len(pull) == 0:
            raise ShapeError("channel: push_keys and pull are both empty: give at least one tensor")
        handle = self._begin(called, mode, push_keys)
        side: Any = None
        told = 0
        refuse: list[int] = []  # they have ended their sides
        try:
            theirs = [self._hear(handle, called, i, timeout_ms) for i in range(workers)]
            refuse = [i for i, t in enumerate(theirs) if "refused" in t]
            if refuse:
                raise describe.refused(f"worker {refuse[0]}", theirs[refuse[0]])
            if given:
                device = given[0].device
            elif device is None:
                cuda = all(t["device"].startswith("cuda") for t in theirs)
                device = torch.device("cuda", torch.cuda.current_device()) if cuda else "cpu"
            device = torch.device(device)
            out = [list(pull[i * each : (i + 1) * each]) for i in range(workers)]
            into = []
            for i, t in enumerate(theirs):
                mine = list(push[i * n : (i + 1) * n]) if push is not None else None
                if mine is None:
                    if [k for k, _, _ in t["out"]] != push_keys:
                        raise ShapeError(
                            f"channel: push_keys are {push_keys} here, and worker {i} pushes "
                            f"{[k for k, _, _ in t['out']]}"
                        )
                    mine = [
                        torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
                        for _, dtype, shape in t["out"]
                    ]
                into.append(mine)
            ours = []
            for i, t in enumerate(theirs):
                keys = pull_keys[i * each : (i + 1) * each]
                a = [describe.of(x, k) for x, k in zip(into[i], push_keys, strict=True)]
                b = [describe.of(x, k) for x, k in zip(out[i], keys, strict=True)]
                _same(i, mode, t, b, a)
                ours.append((b, a))
            here = _place(device)
            direct = _direct(mode, device) and all(t["device"] == here for t in theirs)
            path = mode if direct else "cpu"
            if direct:
                side = _gpu(device, mode, out, into, False, timeout_ms, table)
                self._node.channel_watch(handle, side.abort_word)
            self._node.channel_state(handle)  # before any worker takes this side to be open
            for i in range(workers):
                more = {"gpu": side.describe(i)} if side else {}
                text = describe.text(mode, here, *ours[i], path=path, **more)
                self._node.channel_tell(handle, i, text)
                told += 1
            if side:
                side.attach([t.get("gpu") for t in theirs])
            else:

                def make(given: Any, taken: Any, caller: Caller) -> ServerSide:
                    theirs = [taken[i * n : (i + 1) * n] for i in range(workers)]
                    ours = [given[i * each : (i + 1) * each] for i in range(workers)]
                    return ServerSide(self._node, handle, theirs, ours, caller)

                flat = [t for row in into for t in row]
                side = _carried(device, pull, flat, make, timeout_ms)
            return self._made(
                handle, called, mode, side, path, pull, into, push_keys, device, False, table
            )
        except BaseException as error:
            waiting = (i for i in range(told, workers) if i not in refuse)
            self._refuse(handle, mode, waiting, error)
            self._end(handle, push_keys, side)
            raise

    def _made(
        self,
        handle: int,
        name: str,
        mode: str,
        side: Any,
        path: str,
        out: Sequence[Tensor],
        tensors: Sequence[Sequence[Tensor]],
        keys: Sequence[int],
        device: Any,
        send_first: bool,
        table: Table,
    ) -> Channel:
        import torch

        from fserver.channel import ops

        ops.define(torch)
        channel = Channel(
            self._node,
            handle,
            name,
            mode,
            side,
            path,
            out,
            tensors,
            device,
            send_first,
            lambda: self._keys.difference_update(keys),
            table,
        )
        self._all.add(channel)
        return channel


def _like(tensors: Any) -> Any:
    """Zeros in the place of tensors."""
    return None if tensors is None else [t.new_zeros(t.shape) for t in tensors]


def _same(
    peer: int,
    mode: str,
    theirs: dict[str, Any],
    out: Sequence[list[Any]],
    into: Sequence[list[Any]],
) -> None:
    if theirs["mode"] != mode:
        raise ConfigError(
            f"channel: mode is {mode!r} here and {theirs['mode']!r} at peer {peer}: open both "
            "sides with the same"
        )
    describe.match(peer, "outgoing", out, theirs["in"])
    describe.match(peer, "incoming", into, theirs["out"])


def _carried(
    device: Any,
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor],
    make: Callable[[Any, Any, Caller], WorkerSide | ServerSide],
    timeout_ms: float,
) -> Any:
    """A side whose messages the engine carries."""
    if device.type == "cuda":
        return StreamSide(Gpu(device), outgoing, incoming, make, timeout_ms)
    return make(list(outgoing), list(incoming), Caller(timeout_ms))


def _gpu(
    device: Any,
    mode: str,
    out: Sequence[Sequence[Tensor]],
    into: Sequence[Sequence[Tensor]],
    send_first: bool,
    timeout_ms: float,
    table: Table,
) -> Any:
    from fserver.channel.gpu import GpuSide

    return GpuSide(device.index, mode, out, into, send_first, timeout_ms, table)
