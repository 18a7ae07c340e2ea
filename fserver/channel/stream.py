"""The side of a channel of path "host" with GPU tensors, whose messages the engine carries. The
calls enqueue copies to and from pinned host memory, and words that count the messages. The engine
looks at the words and exchanges the messages. So the calls return at once and can be captured in a
CUDA graph, as with the other paths."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fserver import _loader
from fserver.channel.cpu import Side, check_rows, part, rows_of
from fserver.errors import ConfigError, Error

if TYPE_CHECKING:
    from torch import Tensor

# Of fserver.h: how many words count messages, and which is which.
_WORDS = 16
_RUNG, _ASKED, _DONE, _SENT, _OVER = 0, 1, 8, 9, 10
_NEVER = 2**63 - 1  # done, when the channel has ended

# How long close() waits for what is beyond a time-out of the channel.
_PARTING_S = 2.0

# Memory to which a stream that did not end, or a peer, may still write.
_kept: list[Any] = []


def sweep() -> None:
    """Lets go of the memory of closed sides that nobody uses any more."""
    for side in list(_kept):
        if side._gpu.idle() and side._word(_OVER):
            side._forget()
            with contextlib.suppress(ValueError):  # another thread's sweep
                _kept.remove(side)


class Gpu:
    """What a side needs of a GPU. All but memory is enqueued on the current stream."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch, self.device = torch, device
        self._extension = _loader.load()
        self._mark = self._extension.Mark(device.index)  # behind what was enqueued last
        self._captured = False

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

    def zeros(self, n: int) -> Tensor:
        """int64 on the GPU."""
        return self._torch.zeros(n, dtype=self._torch.int64, device=self.device)

    def flag(self, word: Tensor) -> Tensor:
        """What host() gave, for show() and wait()."""
        return self._extension.map_pinned_tensor(word, self.device.index)

    def settle(self) -> None:
        """Waits for what has filled the memory."""
        self._extension.settle(self.device.index)

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Around what is enqueued for one call."""
        with self._torch.cuda.device(self.device):
            capturing = self._mark.capturing()
            if not capturing and self._mark.elsewhere():
                raise ConfigError(
                    f"{name}: the channel is still in use on another stream (synchronize that "
                    "stream first, or open a channel for each stream)"
                )
            yield
            if capturing:
                self._captured = True
            else:
                self._mark.record()

    def copy(self, to: Tensor, what: Tensor) -> None:
        to.copy_(what, non_blocking=True)

    def fill(self, word: Tensor, value: int) -> None:
        word.fill_(value)

    def count(self, counter: Tensor) -> None:
        self._extension.seq_add_one(counter, kept=True)  # all by the side, until it is idle

    def show(self, flag: Tensor, counter: Tensor) -> None:
        self._extension.write_flag(flag, counter, kept=True)

    def wait(self, flag: Tensor, counter: Tensor) -> None:
        self._extension.wait_flag(flag, counter, kept=True)

    def idle(self) -> bool:
        """Whether all is over that was enqueued outside of graphs."""
        return self._mark.passed()

    def finished(self, seconds: float) -> bool:
        """Waits for what is enqueued; false: not within the time. A graph may be replayed on any
        stream: once there is one, the whole GPU is waited for."""
        if self._captured:
            self._extension.synchronize(self.device.index)
        end = time.monotonic() + seconds
        while not self.idle():
            if time.monotonic() > end:
                return False
            time.sleep(0.0002)
        return True


class StreamSide(Side):
    """One side whose messages the engine exchanges, from and into pinned memory of the host.

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
        out_keys, in_keys: their keys. A server's are not looked at.
        peers: their number.
        worker: whether this is the side of a worker.
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
        timeout_ms: float,
    ) -> None:
        import torch

        sweep()
        self._node, self._channel, self._gpu, self._worker = node, channel, gpu, worker
        self._timeout = timeout_ms
        self._out, self._in = list(outgoing), list(incoming)
        self._out_host = [gpu.host(t) for t in self._out]
        self._in_host = [gpu.host(t) for t in self._in]
        self._words = gpu.host(torch.zeros(_WORDS, dtype=torch.int64))
        self._flags = [gpu.flag(self._words[i : i + 1]) for i in (_RUNG, _DONE, _ASKED)]
        self._rung, self._waited = gpu.zeros(1), gpu.zeros(1)
        self._all = [rows_of(t) for t in self._out]
        self._told = gpu.zeros(len(self._all))
        self._rows_out = self._numbers(len(self._out))
        self._rows_out.copy_(torch.tensor(self._all, dtype=torch.int64))
        self._rows_in = self._numbers(len(self._in))
        self._short = False  # the last message told its rows
        each = len(self._in) // peers
        self._counts = [self._rows_in[i * each : (i + 1) * each] for i in range(peers)]
        self._rows = [gpu.zeros(each) for _ in self._counts]
        gpu.settle()
        if worker:
            ours = (self._out_host, list(out_keys))
            theirs = _with_counts(self._in_host, in_keys, self._rows_in, peers)
            numbers: tuple[Any, Any] = (self._rows_out, None)
        else:
            ours = _with_counts(self._out_host, out_keys, self._rows_out, peers)
            theirs = (self._in_host, [0] * len(self._in))
            numbers = (None, self._rows_in)
        node.channel_carry(channel, self._words, *ours, *theirs, *numbers, timeout_ms)

    def _numbers(self, n: int) -> Tensor:
        import torch

        return self._gpu.host(torch.zeros(n, dtype=torch.int64))

    def _word(self, which: int) -> int:
        return int(self._words[which])

    def rows(self) -> list[Tensor]:
        return self._rows

    def check_error(self) -> None:
        """Raises what has ended the channel."""
        if self._word(_DONE) == _NEVER:
            self._node.channel_state(self._channel)

    # What the streams do

    def send(self, rows: Sequence[int] | None = None) -> None:
        counts = check_rows(rows, self._out)
        self.check_error()
        gpu = self._gpu
        with gpu.call("send"):
            if not self._in:  # nothing else says that the memory is free
                self._await(self._rung)
            for t, host, n in zip(self._out, self._out_host, counts, strict=True):
                if part(t, n).numel():
                    gpu.copy(part(host, n), part(t, n))
            if self._short or counts != self._all:
                for i, n in enumerate(counts):
                    gpu.fill(self._told[i : i + 1], n)
                gpu.copy(self._rows_out, self._told)
                self._short = counts != self._all
            self._ring_bell()

    def recv(self) -> None:
        self.check_error()
        gpu = self._gpu
        with gpu.call("recv"):
            if self._worker and not self._out:
                self._ring_bell()
            gpu.count(self._waited)
            self._await(self._waited)
            for t, host in zip(self._in, self._in_host, strict=True):
                if t.numel():
                    gpu.copy(t, host)
            for rows, counts in zip(self._rows, self._counts, strict=True):
                if rows.numel():
                    gpu.copy(rows, counts)
            if not self._worker and not self._out:
                self._ring_bell()

    def _ring_bell(self) -> None:
        self._gpu.count(self._rung)
        self._gpu.show(self._flags[0], self._rung)

    def _await(self, number: Tensor) -> None:
        self._gpu.show(self._flags[2], number)
        self._gpu.wait(self._flags[1], number)

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
        side after neither the stream nor a peer can write to it any more."""
        self._gpu.finished(_PARTING_S)
        _kept.append(self)
        sweep()

    def _forget(self) -> None:
        """Lets go of what the stream has used: who keeps an error of a call, keeps its frames, and
        so this side."""
        self._out, self._in, self._out_host, self._in_host, self._flags = [], [], [], [], []


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
