"""The side of a channel of path "host" with GPU tensors, whose messages the engine carries. The
calls enqueue copies to and from pinned host memory, and words that count the messages. The engine
looks at the words and exchanges the messages. So the calls return at once and can be captured in a
CUDA graph, as with the other paths."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fserver import _loader
from fserver.channel.cpu import Side, check_rows, first_rows, rows_of
from fserver.errors import ConfigError, Error

if TYPE_CHECKING:
    from torch import Tensor

# Of fserver.h: how many words count messages, and which is which.
_WORDS = 16
_RUNG, _ASKED, _DONE, _SENT, _OVER = 0, 1, 8, 9, 10
_NEVER = 2**63 - 1  # done, when the channel has ended

# What HostCall.run returns: the stream is captured; or nothing was enqueued, because the channel is
# still in use on another stream.
_CAPTURED, _ELSEWHERE = 1, 2


class Call(Protocol):
    """Enqueues what a call of a channel does, with so many bytes of each copy; None: all."""

    def __call__(self, sizes: Sequence[int] | None = None) -> None: ...


# How long close() waits for what is beyond a time-out of the channel.
_PARTING_S = 2.0

# Memory to which a stream that did not end, a graph, or a peer may still write.
_kept: list[Any] = []
# Closed sides of which nobody could tell whether the GPU still uses their memory, because of a
# capture or of Ctrl-C. Who closes another side asks again.
_unfinished: list[Any] = []


def sweep() -> None:
    """Lets go of the memory of closed sides that nobody uses any more."""
    for side in list(_kept):
        if side._gpu.unused() and side._word(_OVER):
            with contextlib.suppress(ValueError):  # another thread's sweep
                _kept.remove(side)
                side._forget()


class Gpu:
    """What a side needs of a GPU. All but memory is enqueued on the current stream."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch, self.device = torch, device
        self._extension = _loader.load()
        self._mark = self._extension.Mark(device.index)  # behind what was enqueued last, by calls
        self.captured = False

    def host(self, like: Tensor) -> Tensor:
        """Zeroed memory of the CPU that the GPU can read and write, of another tensor's shape."""
        try:
            return self._torch.zeros(like.shape, dtype=like.dtype, pin_memory=True)
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            raise Error(
                f"channel: cannot pin {like.nbytes} bytes of host memory for a tensor of shape "
                f"{list(like.shape)}: {text} (raise the limit of locked memory, ulimit -l, or of "
                "the container; or use fewer channels or smaller tensors)"
            ) from error

    def like(self, tensor: Tensor) -> Tensor:
        """Memory of the GPU of another tensor's shape."""
        return self._torch.empty_like(tensor)

    def zeros(self, n: int) -> Tensor:
        """int64 on the GPU."""
        return self._torch.zeros(n, dtype=self._torch.int64, device=self.device)

    def flag(self, word: Tensor) -> Tensor:
        """What host() or like() gave, for call()."""
        if word.is_cuda:
            return word
        flag: Tensor = self._extension.map_pinned_tensor(word, self.device.index)
        return flag

    def alone(self, call: str, do: Callable[..., None], *args: Any) -> None:
        """Calls do, and refuses a second thread meanwhile."""
        self._mark.use(call, do, *args)

    def settle(self) -> None:
        """Waits for what has filled the memory."""
        self._extension.settle(self.device.index)

    def call(
        self,
        name: str,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
        ring: tuple[Tensor, Tensor] | None = None,
        wait: tuple[Tensor, int, Tensor, Tensor] | None = None,
        ring_first: bool = False,
    ) -> Call:
        """Makes one call of a channel, which enqueues a wait, copies and a ring in this order.

        Args:
            name: of the call, for errors.
            copies: to, from; each on the GPU, or what flag() has given.
            ring: count, flag. The stream adds one to count and shows the number in flag.
            wait: count, add, asked, done. The stream adds to count, shows the number in asked,
                and waits until done is that.
            ring_first: the ring comes before the wait.
        """
        made = self._host_call(name)
        if ring:
            made.ring(*ring, not ring_first)
        if wait:
            made.wait(*wait)
        for to, what in copies:
            made.copy(to, what)

        def run(sizes: Sequence[int] | None = None) -> None:
            how = made.run(sizes)
            if how == _ELSEWHERE:
                raise ConfigError(
                    f"{name}: the channel is still in use on another stream (synchronize that "
                    "stream first, or open a channel for each stream)"
                )
            if how == _CAPTURED:
                self.captured = True

        return run

    def _host_call(self, name: str) -> Any:
        return self._extension.HostCall(self._mark, self.device.index, name)

    def fill(self, words: Tensor, values: Sequence[int]) -> None:
        """Enqueues that memory of the GPU gets values."""
        with self._torch.cuda.device(self.device):
            for i, value in enumerate(values):
                words[i : i + 1].fill_(value)

    def idle(self) -> bool:
        """Whether all is over that was enqueued outside of graphs."""
        return bool(self._mark.passed())

    def unused(self) -> bool:
        """Whether the same is so, and there are no graphs of it, which may be replayed."""
        return self.idle() and not self._mark.in_graphs()

    def finished(self, seconds: float) -> bool:
        """Waits for what is enqueued; false: not within the time. A graph may be replayed on any
        stream: once there is one, the whole GPU is waited for."""
        if self.captured:
            self._extension.synchronize(self.device.index)
        end = time.monotonic() + seconds
        while not self.idle():
            if time.monotonic() > end:
                return False
            time.sleep(0.0002)
        return True


class StreamSide(Side):
    """One side whose messages the engine exchanges, from and into pinned memory of the host. With
    ``direct``, from a copy on the GPU and into the tensors themselves.

    The words count messages. ``_RUNG``: the stream has filled, or emptied, the host memory of a
    message. ``_ASKED``: the stream waits for one, and its time-out counts. The engine answers with
    ``_DONE``, when it is through with one.

    Args:
        node: the extension's Worker or Server.
        channel: its handle.
        gpu: of the tensors; a Gpu.
        outgoing: those that go out: a worker's push tensors, or the answers for each worker in
            one list.
        incoming: those that come in, by peer, in one list.
        out_keys, in_keys: their keys. Those of a server's answers are not looked at.
        peers: their number.
        worker: whether this is the side of a worker.
        lands: what workers push is received where the servers want it, by keys of the channel's
            own: a worker's ``out_keys``, a server's ``in_keys``. Otherwise the servers' CPUs copy
            it there.
        direct: the peers read and write memory of this GPU, as NICs with GPUDirect do.
        timeout_ms: how long the stream waits for a peer.
    """

    capturable = True

    def __init__(
        self,
        node: Any,
        channel: int,
        gpu: Any,
        outgoing: Sequence[Tensor],
        out_keys: Sequence[int],
        incoming: Sequence[Tensor],
        in_keys: Sequence[int],
        peers: int,
        worker: bool,
        lands: bool,
        direct: bool,
        timeout_ms: float,
    ) -> None:
        import torch

        sweep()
        self._node, self._channel, self._gpu, self._worker = node, channel, gpu, worker
        self._timeout = timeout_ms
        self._out, self._in = list(outgoing), list(incoming)
        # What goes out is copied, because the tensors may change as soon as the stream has sent it.
        self._sent = [gpu.like(t) if direct else gpu.host(t) for t in self._out]
        # A CPU copies messages that do not land. Those of a server that sends nothing are copied as
        # well: recv() lets the workers write the next ones.
        lands_here = direct and (worker or lands)
        self._in_place = lands_here and (worker or bool(self._out))
        self._received = self._in
        if not self._in_place:
            self._received = [gpu.like(t) if lands_here else gpu.host(t) for t in self._in]
        self._words = gpu.host(torch.zeros(_WORDS, dtype=torch.int64))
        self._all = [rows_of(t) for t in self._out]
        # The numbers of rows of a message: of all rows, of fewer, and those that are sent.
        self._whole, self._fewer = gpu.zeros(len(self._all)), gpu.zeros(len(self._all))
        self._whole.copy_(torch.tensor(self._all, dtype=torch.int64))
        self._rows_out = self._numbers(len(self._out))
        self._rows_in = self._numbers(len(self._in))
        each = len(self._in) // peers
        rows = gpu.zeros(len(self._in))
        self._rows = [rows[i * each : (i + 1) * each] for i in range(peers)]
        self._send, self._recv = self._calls(rows)
        self._look = gpu.call("send")
        gpu.settle()
        if worker:
            ours = (self._sent, list(out_keys))
            theirs = _with_counts(self._received, in_keys, self._rows_in, peers)
            numbers: tuple[Any, Any] = (self._rows_out, None)
        else:
            ours = _with_counts(self._sent, out_keys, self._rows_out, peers)
            theirs = (self._received, list(in_keys) if lands else [0] * len(self._in))
            numbers = (None, self._rows_in)
        node.channel_carry(channel, self._words, *ours, *theirs, *numbers, timeout_ms, lands)

    def _numbers(self, n: int) -> Tensor:
        import torch

        words: Tensor = self._gpu.host(torch.zeros(n, dtype=torch.int64))
        return words

    def _word(self, which: int) -> int:
        return int(self._words[which])

    @property
    def captured(self) -> bool:  # type: ignore[override]
        return bool(self._gpu.captured)

    def rows(self) -> list[Tensor]:
        return self._rows

    def check_error(self) -> None:
        """Raises what has ended the channel."""
        if self._word(_DONE) == _NEVER:
            self._node.channel_state(self._channel)

    # What the streams do

    def _calls(self, rows: Tensor) -> tuple[Call, Call]:
        """What send() and recv() enqueue."""
        gpu, worker = self._gpu, self._worker
        rung, done, asked = (gpu.flag(self._words[i : i + 1]) for i in (_RUNG, _DONE, _ASKED))
        sent, waited = gpu.zeros(1), gpu.zeros(1)
        ring = (sent, rung)
        # With nothing that comes, nothing else says that the memory is free.
        free = None if self._in else (sent, 0, asked, done)
        # Each message has its numbers written: in a graph, nobody knows what was sent before.
        numbers = [(gpu.flag(self._rows_out), n) for n in (self._whole, self._fewer)]
        out = [(gpu.flag(to), t) for t, to in zip(self._out, self._sent, strict=True)]
        into: list[tuple[Tensor, Tensor]] = []
        if not self._in_place:
            into = [(t, gpu.flag(of)) for t, of in zip(self._in, self._received, strict=True)]
        into.append((rows, gpu.flag(self._rows_in)))
        return (
            gpu.call("send", wait=free, copies=numbers + out, ring=ring),
            gpu.call(
                "recv",
                ring=None if self._out else ring,
                wait=(waited, 1, asked, done),
                copies=into,
                ring_first=worker,
            ),
        )

    def send(self, rows: Sequence[int] | None = None) -> None:
        self._gpu.alone("send", self._enqueue, rows)

    def recv(self) -> None:
        self._gpu.alone("recv", self._take)

    def _enqueue(self, rows: Sequence[int] | None) -> None:
        self.check_error()
        counts = check_rows(rows, self._out)
        numbers = self._rows_out.nbytes
        if counts == self._all:
            self._send([numbers, 0, *(t.nbytes for t in self._out)])
            return
        self._look()  # before anything is enqueued: another stream may still read the numbers
        self._gpu.fill(self._fewer, counts)
        sent = (first_rows(t, n) for t, n in zip(self._out, counts, strict=True))
        self._send([0, numbers, *(t.nbytes for t in sent)])

    def _take(self) -> None:
        self.check_error()
        self._recv()

    # The end

    def finish(self) -> None:
        """Waits for what is enqueued, and until it has been sent; bounded."""
        end = time.monotonic() + _PARTING_S
        if self._gpu.finished(self._timeout / 1000 + _PARTING_S):
            while self._word(_DONE) != _NEVER and self._word(_SENT) < self._word(_RUNG):
                if time.monotonic() > end:
                    break
                time.sleep(0.0002)

    def close(self) -> None:
        """Lets go of the memory, when the node has closed the channel: at once, or with the next
        side after neither a stream, a graph nor a peer can write to it any more."""
        try:
            self._gpu.finished(_PARTING_S)
        except BaseException:
            _unfinished.append(self)
            raise
        _kept.append(self)
        for side in list(_unfinished):
            # One that was captured is known by a wait for all of the GPU, as this one just made.
            waited = self._gpu.captured and self._gpu.device == side._gpu.device
            if waited or not side._gpu.captured:
                with contextlib.suppress(Exception):
                    side._gpu.finished(0)
                    _unfinished.remove(side)
                    _kept.append(side)
        sweep()

    def _forget(self) -> None:
        """Lets go of what the stream has used: who keeps an error of a call, keeps its frames, and
        so this side."""
        self._out, self._in, self._sent, self._received = [], [], [], []
        del self._send, self._recv, self._look


def _with_counts(
    tensors: Sequence[Tensor], keys: Sequence[int], counts: Tensor, peers: int
) -> tuple[list[Tensor], list[int]]:
    """Returns the tensors of each peer with its row counts behind them, as CPU sides send them."""
    each = len(tensors) // peers
    if not each:
        return [], []
    all_tensors: list[Tensor] = []
    all_keys: list[int] = []
    for i in range(peers):
        mine = slice(i * each, (i + 1) * each)
        all_tensors += [*tensors[mine], counts[mine]]
        all_keys += [*keys[mine], 0]
    return all_tensors, all_keys
