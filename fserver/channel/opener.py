"""Opener: opens channels for Worker.channel and Server.channel. Each side describes its tensors to
its peers, compares the descriptions, and uses the path that both sides support."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fserver.channel import describe
from fserver.channel.channel import Channel, How, captured, close_all, part
from fserver.channel.cpu import Caller, ServerSide, WorkerSide
from fserver.channel.plan import Table
from fserver.channel.stream import Gpu, StreamSide
from fserver.channel.tune import tuned
from fserver.errors import ConfigError, Error, PeerLostError, ShapeError, TimeoutError

if TYPE_CHECKING:
    from torch import Tensor


def _gpu_of(node: Any) -> Any:
    """Returns the GPU of a node, which is the only GPU that its channels may use. Returns None if
    the backend of the node is CPU: then its channels may use any GPU."""
    import torch

    return torch.device("cuda", node.device) if node.device >= 0 else None


def _place(device: Any) -> str:
    """Returns a text that is equal for GPUs which may reach each other's memory: GPUs of one host,
    in processes that share their namespaces. describe.apart compares the texts."""
    if device.type != "cuda":
        return "cpu"
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.exists() else platform.node()
    return " ".join([f"cuda@{host}", *map(_namespace, describe.NAMESPACES)])


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return f"{kind}:unknown"


def _outside(device: Any) -> None:
    """Refuses to open a channel during the capture of a CUDA graph, because opening allocates and
    waits. Call this before the peers are told of the channel, because they would wait for it.

    Raises:
        ConfigError: the current stream, or that of the tensors' device, is being captured.
    """
    if captured(device):
        raise ConfigError(
            "channel: the current stream is being captured into a CUDA graph, and a channel cannot "
            "be opened during a capture: open the channel before the capture"
        )


def _direct(mode: str, device: Any) -> bool:
    """Reports whether the GPUs may exchange messages without the engine."""
    return mode != "host" and device.type == "cuda"


def _streams(device: Any) -> bool:
    """Reports whether a side that the engine carries is a StreamSide."""
    return bool(device.type == "cuda")


class _Opening:
    """A channel that this side is still opening.

    Attributes:
        handle: the node's number of the channel.
        side: the GpuSide or the side in host memory, once it exists.
        direct: whether it is a GpuSide.
        waiting: the peers that wait for the description of this side.
    """

    def __init__(self, node: Any, handle: int, how: How, peers: int) -> None:
        self._node, self._mode = node, how.mode
        self.handle = handle
        self.side: Any = None
        self.direct = False
        self.waiting = list(range(peers))

    def unmap(self) -> None:
        """Closes the GpuSide, if there is one."""
        if self.direct:
            self._node.channel_watch(self.handle, 0)
            self.side.close()
            self.side, self.direct = None, False

    def confirm(self, peer: int, path: str, reason: str) -> None:
        """Tells a server that does not need the engine which path the channel takes."""
        text = describe.text(self._mode, "", [], [], path=path, reason=reason)
        self._node.channel_tell(self.handle, peer, text)

    def tell(
        self, peer: int, place: str, out: list[list[Any]], into: list[list[Any]], **more: Any
    ) -> None:
        """Describes this side to a peer."""
        if self.direct:
            more["gpu"] = self.side.describe(peer)
        text = describe.text(self._mode, place, out, into, **more)
        self._node.channel_tell(self.handle, peer, text)
        self.waiting.remove(peer)


class Opener:
    """Opens the channels of one node, names them, and refuses a key that another channel has."""

    def __init__(self, node: Any) -> None:
        self._node = node  # the extension's Worker or Server
        self._lock = threading.Lock()  # of the next two
        self._next = 0  # number of a channel without a name
        self._given_back: set[int] = set()  # those below it that are free
        self._keys: set[int] = set()
        self._all: weakref.WeakSet[Channel] = weakref.WeakSet()

    def close(self) -> None:
        """Closes all channels that are open."""
        close_all(list(self._all))

    @contextlib.contextmanager
    def called(self, name: str | None) -> Iterator[str]:
        """Yields the name of a channel that is opened in the ``with`` block. An unnamed channel
        gets the lowest free number. If opening fails, the number is free again, so that the two
        sides agree on it even if one of them has to try more often.

        Raises:
            ConfigError: ``name`` is not text that can be sent to the other side.
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

    def worker(
        self,
        push: Sequence[Tensor],
        push_keys: Sequence[int],
        pull: Sequence[Tensor],
        pull_keys: Sequence[int],
        how: How,
    ) -> Channel:
        """See Worker.channel."""
        push = describe.listed("push", push, "tensors")
        pull = describe.listed("pull", pull, "tensors")
        push_keys = describe.listed("push_keys", push_keys, "ints")
        pull_keys = describe.listed("pull_keys", pull_keys, "ints")
        describe.check("channel", "push", push, push_keys, False)
        describe.check("channel", "pull", pull, pull_keys, True)
        if not push and not pull:
            raise ShapeError("channel: push and pull are both empty: give at least one tensor")
        device = describe.of_one_device({"push": push, "pull": pull}, None, _gpu_of(self._node))
        _outside(device)
        if how.tune and how.mode == "kernel":

            def trial(number: str, table: Table) -> Channel:
                other = how.trial(number, table)
                return self.worker(_like(push), push_keys, _like(pull), pull_keys, other)

            how = replace(how, table=tuned(trial, True))
        if len(push_keys) != len(push):
            raise ShapeError(
                f"channel: {len(push_keys)} push_keys for {len(push)} push tensors: give one key "
                "for each tensor"
            )
        servers = self._node.servers
        shares, keys = describe.divided(pull, pull_keys, servers, "server")
        out = describe.all_of(push, push_keys)
        into = [describe.all_of(*share) for share in zip(shares, keys, strict=True)]
        with self._opening(how, push_keys, servers, True) as it:
            if _direct(how.mode, device):
                it.side, it.direct = _gpu(device, how, [push] * servers, shares, True), True
                self._node.channel_watch(it.handle, it.side.abort_word)
            lands = describe.landing() if _streams(device) else 0
            for i in range(servers):
                it.tell(i, _place(device), out, into[i], lands=lands)
            path, answers, reason = self._answers(it.handle, how, out, into)
            if path == "host":
                it.unmap()
                flat = [key for share in keys for key in share]
                if not _streams(device):
                    it.side = WorkerSide(
                        self._node, it.handle, push, push_keys, pull, flat, servers,
                        Caller(how.timeout_ms),
                    )  # fmt: skip
                else:
                    landed = all(theirs.get("lands") for theirs in answers)
                    sent = describe.landing_keys(lands, len(push)) if landed else push_keys
                    it.side = self._carried(
                        it.handle, device, push, sent, pull, flat, servers, True, landed, how
                    )
            elif path == how.mode and it.side:
                it.side.attach([theirs.get("gpu") for theirs in answers])
            else:
                raise Error(
                    f"channel: the servers chose path {path!r:.40}, but this side can use "
                    f"{how.mode if it.side else 'host'!r} only: open both sides with the same mode"
                )
            for i in (i for i, theirs in enumerate(answers) if theirs["path"] != "host"):
                it.confirm(i, path, reason)
            return self._made(it, how, path, reason, push, shares, push_keys, device, True)

    def server(
        self,
        push_keys: Sequence[int],
        pull: Sequence[Tensor],
        pull_keys: Sequence[int],
        push: Sequence[Tensor] | None,
        device: Any,
        how: How,
    ) -> Channel:
        """See Server.channel."""
        pull = describe.listed("pull", pull, "tensors")
        push_keys = describe.listed("push_keys", push_keys, "ints")
        pull_keys = describe.listed("pull_keys", pull_keys, "ints")
        push = None if push is None else describe.listed("push", push, "tensors")
        device = describe.device(device)
        describe.check("channel", "pull", pull, pull_keys, False)
        describe.check("channel", "push", push or [], push_keys, True)
        gpu = _gpu_of(self._node)
        device = describe.of_one_device({"push": push or [], "pull": pull}, device, gpu)
        _outside(device)
        if how.tune and how.mode == "kernel":

            def trial(number: str, table: Table) -> Channel:
                some, other = (_like(pull), _like(push)), how.trial(number, table)
                return self.server(push_keys, some[0], pull_keys, some[1], device, other)

            how = replace(how, table=tuned(trial, False))
        workers, n = self._node.workers, len(push_keys)
        shares, keys = describe.divided(pull, pull_keys, workers, "worker")
        if push is not None and len(push) != n * workers:
            raise ShapeError(
                f"channel: {len(push)} push tensors for {n} push_keys and {workers} workers: give "
                f"{n * workers} tensors, those of worker 0 first"
            )
        if n + len(pull) == 0:
            raise ShapeError("channel: push_keys and pull are both empty: give at least one tensor")
        with self._opening(how, push_keys, workers, False) as it:
            theirs = [self._hear(it.handle, how, i) for i in range(workers)]
            refuse = [i for i, t in enumerate(theirs) if "refused" in t]
            if refuse:  # they have ended their sides
                it.waiting = [i for i in it.waiting if i not in refuse]
                raise describe.refused(f"worker {refuse[0]}", theirs[refuse[0]])
            device = device or _like_theirs(theirs, gpu)
            into, told = [], []
            for i, t in enumerate(theirs):
                if push is None:
                    into.append(_as_pushed(i, t, push_keys, device))
                else:
                    into.append(push[i * n : (i + 1) * n])
                told.append(
                    (describe.all_of(shares[i], keys[i]), describe.all_of(into[i], push_keys))
                )
                _same(i, how.mode, t, *told[i])
            here = _place(device)
            direct = _direct(how.mode, device) and all(t["device"] == here for t in theirs)
            path, reasons = how.mode if direct else "host", [""] * workers
            if not direct and how.mode != "host":
                reasons = [describe.apart(i, here, t["device"]) for i, t in enumerate(theirs)]
            lands = [] if direct or not _streams(device) else [t.get("lands") for t in theirs]
            landed = bool(lands) and all(lands)

            def carried(landed: bool) -> StreamSide | ServerSide:
                if not _streams(device):
                    return ServerSide(self._node, it.handle, into, shares, Caller(how.timeout_ms))
                flat = [t for row in into for t in row]
                got = [key for base in lands for key in describe.landing_keys(base or 0, n)]
                return self._carried(
                    it.handle, device, pull, [0] * len(pull), flat, got, workers, False, landed, how
                )

            if direct:
                it.side, it.direct = _gpu(device, how, shares, into, False), True
                self._node.channel_watch(it.handle, it.side.abort_word)
            else:
                it.side = carried(landed)
            self._node.channel_state(it.handle)  # before any worker takes this side to be open
            for i in range(workers):
                it.tell(i, here, *told[i], path=path, reason=reasons[i], lands=landed)
            if direct:
                path, reasons = self._confirmed(it.handle, how, workers)
            if path != "host":
                it.side.attach([t.get("gpu") for t in theirs])
            elif direct:
                it.unmap()
                it.side = carried(False)
            reason = "; ".join(filter(None, reasons))
            return self._made(it, how, path, reason, pull, into, push_keys, device, False)

    @contextlib.contextmanager
    def _opening(
        self, how: How, push_keys: Sequence[int], peers: int, worker: bool
    ) -> Iterator[_Opening]:
        """Opens a channel in the ``with`` block. If the block fails, the peers are told the reason,
        and all resources are dropped. Servers that open their sides later are also told why a
        worker has refused."""
        it = _Opening(self._node, self._begin(how.name, how.mode, push_keys), how, peers)
        try:
            yield it
        except BaseException as error:
            self._refuse(it.handle, how.mode, it.waiting, error)
            self._keys.difference_update(push_keys)
            why = describe.lasting(how.mode, error) if worker else ""
            if it.side:
                part(self._node, it.handle, it.side, why=why)
            else:
                self._node.channel_close(it.handle, 0, why)
            raise

    def _begin(self, called: str, mode: str, push_keys: Sequence[int]) -> int:
        if mode not in describe.MODES:
            raise ConfigError(f"channel: mode is {mode!r}, want one of {', '.join(describe.MODES)}")
        if len(set(push_keys)) != len(push_keys):
            twice, _ = Counter(push_keys).most_common(1)[0]
            raise ConfigError(
                f"channel: push_keys has key {twice} twice: give each tensor a key of its own"
            )
        taken = self._keys.intersection(push_keys)
        if taken:
            raise ConfigError(
                f"channel: another open channel of this node has key {min(taken)}: give each "
                "channel keys of its own, or close the other channel first"
            )
        handle: int = self._node.channel_open(called)
        self._keys.update(push_keys)
        return handle

    def _hear(self, handle: int, how: How, peer: int) -> dict[str, Any]:
        """Returns the description that a peer has sent of its side."""
        try:
            return describe.read(peer, self._node.channel_text(handle, peer, how.timeout_ms))
        except TimeoutError as late:
            raise TimeoutError(
                f"{late}: this side has named the channel {how.name!r}: call channel() on both "
                "sides with the same name=, or, without names, in the same order"
            ) from None

    def _answers(
        self, handle: int, how: How, out: list[list[Any]], into: Sequence[list[list[Any]]]
    ) -> tuple[str, list[dict[str, Any]], str]:
        """Returns the path of the channel, what each server has told, and why the path is not the
        mode. If one server needs the engine, all use it."""
        answers: list[dict[str, Any]] = []
        for i, share in enumerate(into):
            theirs = self._hear(handle, how, i)
            if "refused" in theirs:
                raise describe.refused(f"server {i}", theirs)
            _same(i, how.mode, theirs, out, share)
            answers.append(theirs)
        reason = "; ".join(filter(None, map(describe.reason, answers)))
        paths = {theirs.setdefault("path", "") for theirs in answers}
        return "host" if "host" in paths else paths.pop(), answers, reason

    def _confirmed(self, handle: int, how: How, workers: int) -> tuple[str, list[str]]:
        """Returns the path that the workers name, all from the same answers, and why it is not the
        mode."""
        reasons: list[str] = []
        path = how.mode
        for i in range(workers):
            theirs = self._hear(handle, how, i)
            if "refused" in theirs:
                raise describe.refused(f"worker {i}", theirs)
            if theirs.get("path") == "host":
                path = "host"
                reasons.append(describe.reason(theirs))
        return path, list(dict.fromkeys(reasons))

    def _refuse(self, handle: int, mode: str, peers: Iterable[int], error: BaseException) -> None:
        """Tells the peers that wait for the description of this side why there is none. No other
        peer is told: a peer that has stopped waiting, and the successor of a lost peer, may open
        the channel again and would take the refusal for the answer to that."""
        lost = -1
        if isinstance(error, PeerLostError) and error.role != "scheduler":
            lost = error.rank
        for i in (i for i in peers if i != lost):
            with contextlib.suppress(Error):
                self._node.channel_tell(handle, i, describe.refusal(mode, error))

    def _carried(
        self,
        handle: int,
        device: Any,
        outgoing: Sequence[Tensor],
        out_keys: Sequence[int],
        incoming: Sequence[Tensor],
        in_keys: Sequence[int],
        peers: int,
        worker: bool,
        lands: bool,
        how: How,
    ) -> StreamSide:
        """Returns a side with GPU tensors whose messages the engine carries; see StreamSide."""
        direct = _gpu_of(self._node) == device and self._node.gpu_direct()
        return StreamSide(
            self._node, handle, Gpu(device), outgoing, out_keys, incoming, in_keys, peers, worker,
            lands, direct, how.timeout_ms,
        )  # fmt: skip

    def _made(
        self,
        it: _Opening,
        how: How,
        path: str,
        reason: str,
        out: Sequence[Tensor],
        tensors: Sequence[Sequence[Tensor]],
        keys: Sequence[int],
        device: Any,
        send_first: bool,
    ) -> Channel:
        free = self._keys.difference_update
        channel = Channel(
            self._node, it.handle, how, it.side, path, reason, out, tensors, device, send_first,
            lambda: free(keys),
        )  # fmt: skip
        self._all.add(channel)
        return channel


def _zeros(shape: Sequence[int], dtype: Any, device: Any, what: str) -> Tensor:
    import torch

    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        raise Error(
            f"channel: cannot allocate a tensor of shape {list(shape)} and {dtype} on {device} "
            f"{what}: {text} (free memory there, or use smaller tensors)"
        ) from error


def _like(tensors: Any) -> Any:
    """Returns zeros of the same shapes."""
    if tensors is None:
        return None
    return [_zeros(t.shape, t.dtype, t.device, "for the trials of tune=True") for t in tensors]


def _like_theirs(theirs: Sequence[dict[str, Any]], gpu: Any) -> Any:
    """Returns the device for a server that names none. If the tensors of all workers are on GPUs
    and this process sees a GPU, it is the node's GPU, or, with backend CPU, the current GPU.
    Otherwise it is the CPU."""
    import torch

    if torch.cuda.is_available() and all(t["device"].startswith("cuda") for t in theirs):
        return gpu or torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _as_pushed(
    worker: int, theirs: dict[str, Any], push_keys: Sequence[int], device: Any
) -> list[Tensor]:
    """Returns tensors that can hold what a worker pushes."""
    import torch

    keys = [key for key, _, _ in theirs["out"]]
    if keys != push_keys:
        raise ShapeError(
            f"channel: push_keys are {push_keys} here, but worker {worker} pushes {keys}: give the "
            "same keys on both sides"
        )
    what = f"for the pushes of worker {worker}"
    return [_zeros(shape, getattr(torch, dtype), device, what) for _, dtype, shape in theirs["out"]]


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
            "sides with the same mode"
        )
    describe.match(peer, "outgoing", out, theirs["in"])
    describe.match(peer, "incoming", into, theirs["out"])


def _gpu(
    device: Any,
    how: How,
    out: Sequence[Sequence[Tensor]],
    into: Sequence[Sequence[Tensor]],
    send_first: bool,
) -> Any:
    from fserver.channel.gpu import GpuSide

    return GpuSide(device.index, how.mode, out, into, send_first, how.timeout_ms, how.table)
