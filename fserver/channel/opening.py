"""One channel that is being opened: what the two sides tell each other, and the path that they
choose."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fserver.channel import describe
from fserver.channel.channel import How
from fserver.channel.cpu import Caller, ServerSide, WorkerSide
from fserver.channel.stream import Gpu, StreamSide
from fserver.errors import ConfigError, Error, PeerLostError, TimeoutError

if TYPE_CHECKING:
    from torch import Tensor


def gpu_of(node: Any) -> Any:
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


def _direct(mode: str, device: Any) -> bool:
    """Reports whether the GPUs may exchange messages without the engine."""
    return mode != "host" and device.type == "cuda"


def _streams(device: Any) -> bool:
    """Reports whether a side that the engine carries is a StreamSide."""
    return bool(device.type == "cuda")


def _gpu(
    device: Any,
    how: How,
    out: Sequence[Sequence[Tensor]],
    into: Sequence[Sequence[Tensor]],
    send_first: bool,
) -> Any:
    from fserver.channel.gpu import GpuSide

    return GpuSide(device.index, how.mode, out, into, send_first, how.timeout_ms, how.table)


class Opening:
    """A channel that this side is still opening.

    Attributes:
        handle: the node's number of the channel.
        side: the side, once it exists.
        direct: whether it is a GpuSide.
        shown: whether a peer may write to the memory of the GpuSide.
        waiting: the peers that wait for the description of this side.
    """

    def __init__(self, node: Any, handle: int, how: How, device: Any, peers: int) -> None:
        self._node, self._how, self._device, self._peers = node, how, device, peers
        self.handle = handle
        self.side: Any = None
        self.direct = self.shown = False
        self.waiting = list(range(peers))

    def hear(self, peer: int) -> dict[str, Any]:
        """Returns what a peer tells next of its side."""
        how = self._how
        try:
            return describe.read(peer, self._node.channel_text(self.handle, peer, how.timeout_ms))
        except TimeoutError as late:
            raise TimeoutError(
                f"{late}: this side has named the channel {how.name!r}: call channel() on both "
                "sides with the same name=, or, without names, in the same order"
            ) from None

    def same(
        self, peer: int, theirs: dict[str, Any], out: Sequence[list[Any]], into: Sequence[list[Any]]
    ) -> None:
        """Checks that mode and tensors are the same on both sides."""
        mode = self._how.mode
        if theirs["mode"] != mode:
            raise ConfigError(
                f"channel: mode is {mode!r} here and {theirs['mode']!r} at peer {peer}: open both "
                "sides with the same mode"
            )
        describe.match(peer, "outgoing", out, theirs["in"])
        describe.match(peer, "incoming", into, theirs["out"])

    def tell(
        self, peer: int, place: str, out: list[list[Any]], into: list[list[Any]], **more: Any
    ) -> None:
        """Describes this side to a peer."""
        if self.direct:
            more["gpu"] = self.side.describe(peer)
        text = describe.text(self._how.mode, place, out, into, **more)
        self._node.channel_tell(self.handle, peer, text)
        self.waiting.remove(peer)

    def refuse(self, error: BaseException) -> None:
        """Tells the peers that wait for the description of this side why there is none. No other
        peer is told: a peer that has stopped waiting, and the successor of a lost peer, may open
        the channel again and would take the refusal for the answer to that."""
        lost = -1
        if isinstance(error, PeerLostError) and error.role != "scheduler":
            lost = error.rank
        for i in (i for i in self.waiting if i != lost):
            with contextlib.suppress(Error):
                refusal = describe.refusal(self._how.mode, error)
                self._node.channel_tell(self.handle, i, refusal)

    def map(
        self, out: Sequence[Sequence[Tensor]], into: Sequence[Sequence[Tensor]], send_first: bool
    ) -> None:
        """Makes a GpuSide."""
        self.side, self.direct = _gpu(self._device, self._how, out, into, send_first), True
        self._node.channel_watch(self.handle, self.side.abort_word)

    def unmap(self) -> None:
        """Closes the GpuSide, if there is one."""
        if self.direct:
            self._node.channel_watch(self.handle, 0)
            self.side.close()
            self.side, self.direct = None, False

    def _stream(
        self,
        out: Sequence[Tensor],
        out_keys: Sequence[int],
        into: Sequence[Tensor],
        in_keys: Sequence[int],
        worker: bool,
        lands: bool,
    ) -> None:
        """Makes a side with GPU tensors whose messages the engine carries; see StreamSide."""
        direct = gpu_of(self._node) == self._device and self._node.gpu_direct()
        self.side = StreamSide(
            self._node, self.handle, Gpu(self._device), out, out_keys, into, in_keys, self._peers,
            worker, lands, direct, self._how.timeout_ms,
        )  # fmt: skip


class WorkerOpening(Opening):
    """A worker's."""

    def open(
        self,
        push: Sequence[Tensor],
        push_keys: Sequence[int],
        shares: Sequence[Sequence[Tensor]],
        keys: Sequence[Sequence[int]],
    ) -> tuple[str, str]:
        """Makes the side. Returns the path, and why it is not the mode."""
        how, device = self._how, self._device
        out = describe.all_of(push, push_keys)
        into = [describe.all_of(*share) for share in zip(shares, keys, strict=True)]
        if _direct(how.mode, device):
            self.map([push] * self._peers, shares, True)
        lands = describe.landing() if _streams(device) else 0
        for i in range(self._peers):
            self.tell(i, _place(device), out, into[i], lands=lands)
        path, answers, reason = self._answers(out, into)
        if path == "host":
            self.unmap()
            landed = all(theirs.get("lands") for theirs in answers)
            sent = describe.landing_keys(lands, len(push)) if lands and landed else push_keys
            pull = [t for share in shares for t in share]
            flat = [key for share in keys for key in share]
            if _streams(device):
                self._stream(push, sent, pull, flat, True, landed)
            else:
                self.side = WorkerSide(
                    self._node, self.handle, push, push_keys, pull, flat, self._peers,
                    Caller(how.timeout_ms),
                )  # fmt: skip
        elif path == how.mode and self.side:
            self.side.attach([theirs.get("gpu") for theirs in answers])
        else:
            raise Error(
                f"channel: the servers chose path {path!r:.40}, but this side can use "
                f"{how.mode if self.side else 'host'!r} only: open both sides with the same mode"
            )
        self.shown = self.direct
        for i in (i for i, theirs in enumerate(answers) if theirs["path"] != "host"):
            text = describe.text(how.mode, "", [], [], path=path, reason=reason)
            self._node.channel_tell(self.handle, i, text)  # the server waits for it
        return path, reason

    def _answers(
        self, out: list[list[Any]], into: Sequence[list[list[Any]]]
    ) -> tuple[str, list[dict[str, Any]], str]:
        """Returns the path of the channel, what each server has told, and why the path is not the
        mode. If one server needs the engine, all use it."""
        answers: list[dict[str, Any]] = []
        for i, share in enumerate(into):
            theirs = self.hear(i)
            if "refused" in theirs:
                raise describe.refused(f"server {i}", theirs)
            self.same(i, theirs, out, share)
            answers.append(theirs)
        reason = "; ".join(filter(None, map(describe.reason, answers)))
        paths = {theirs.setdefault("path", "") for theirs in answers}
        return "host" if "host" in paths else paths.pop(), answers, reason


class ServerOpening(Opening):
    """A server's."""

    def hear_all(self) -> list[dict[str, Any]]:
        """Returns the descriptions of all workers."""
        theirs = [self.hear(i) for i in range(self._peers)]
        refuse = [i for i, t in enumerate(theirs) if "refused" in t]
        if refuse:  # they have ended their sides
            self.waiting = [i for i in self.waiting if i not in refuse]
            raise describe.refused(f"worker {refuse[0]}", theirs[refuse[0]])
        return theirs

    def open(
        self,
        theirs: Sequence[dict[str, Any]],
        device: Any,
        into: Sequence[Sequence[Tensor]],
        push_keys: Sequence[int],
        shares: Sequence[Sequence[Tensor]],
        keys: Sequence[Sequence[int]],
    ) -> tuple[str, str]:
        """Makes the side, for what the workers have told. Returns the path, and why it is not the
        mode."""
        self._device, how, here = device, self._how, _place(device)
        told = []
        for i, t in enumerate(theirs):
            told.append((describe.all_of(shares[i], keys[i]), describe.all_of(into[i], push_keys)))
            self.same(i, t, *told[i])
        reasons = [""] * self._peers
        if how.mode != "host":
            reasons = [describe.apart(i, here, t["device"]) for i, t in enumerate(theirs)]
        path = how.mode if _direct(how.mode, device) and not any(reasons) else "host"
        firsts = [t.get("lands", 0) for t in theirs]
        lands = path == "host" and _streams(device) and min(firsts) >= describe.LANDING
        if path == "host":
            self._carry(into, shares, firsts, lands)
        else:
            self.map(shares, into, False)
        self._node.channel_state(self.handle)  # before any worker takes this side to be open
        self.shown = self.direct
        for i in range(self._peers):
            self.tell(i, here, *told[i], path=path, reason=reasons[i], lands=lands)
        if self.direct:
            path, reasons = self._confirmed()
        if path != "host":
            self.side.attach([t.get("gpu") for t in theirs])
        elif self.direct:
            self.unmap()
            self._carry(into, shares, firsts, False)
        return path, "; ".join(filter(None, reasons))

    def _carry(
        self,
        into: Sequence[Sequence[Tensor]],
        shares: Sequence[Sequence[Tensor]],
        firsts: Sequence[int],
        lands: bool,
    ) -> None:
        """Makes a side whose messages the engine carries. ``firsts`` are the keys of landing()."""
        if not _streams(self._device):
            caller = Caller(self._how.timeout_ms)
            self.side = ServerSide(self._node, self.handle, into, shares, caller)
            return
        out, received = ([t for row in rows for t in row] for rows in (shares, into))
        got: list[int] = []
        for first, row in zip(firsts, into, strict=True):
            got += describe.landing_keys(first, len(row))
        self._stream(out, [0] * len(out), received, got, False, lands)

    def _confirmed(self) -> tuple[str, list[str]]:
        """Returns the path that the workers name, all from the same answers, and why it is not the
        mode."""
        reasons: list[str] = []
        path = self._how.mode
        for i in range(self._peers):
            theirs = self.hear(i)
            if "refused" in theirs:
                raise describe.refused(f"worker {i}", theirs)
            if theirs.get("path") == "host":
                path = "host"
                reasons.append(describe.reason(theirs))
        return path, list(dict.fromkeys(reasons))
