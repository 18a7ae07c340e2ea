"""The side of a channel of path "host" with GPU tensors, whose messages the engine carries. The
calls enqueue copies to and from pinned host memory, and flags. A thread of the channel waits for
the flags and exchanges the messages. So the calls return at once and can be captured in a CUDA
graph, as with the other paths."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fserver import _loader
from fserver.channel.cpu import (
    REOPEN,
    SLICE_MS,
    Caller,
    Side,
    WorkerSide,
    check_rows,
    part,
    rows_of,
)
from fserver.errors import ConfigError, Error, TimeoutError

if TYPE_CHECKING:
    from torch import Tensor

    from fserver.channel.cpu import ServerSide

_NEVER = 2**63 - 1  # no message has this number

# How long close() waits for what is beyond a time-out of the channel.
_PARTING_S = 2.0

# Memory to which a stream that did not end may still write.
_kept: list[Any] = []


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


class _Ended(Exception):
    """The channel is being closed."""


class StreamSide(Side, Caller):
    """One side over another that is in host memory.

    Three flags in host memory count messages. ``ring``: the stream has filled, or emptied, the
    host memory of a message. ``done``: the exchange is through with one. ``asked``: the stream
    waits for that, and its time-out counts.

    Args:
        gpu: of the tensors; a Gpu.
        outgoing: those that go out, in the order of their row counts.
        incoming: those that come in, by peer, in one list.
        make: gives the WorkerSide or ServerSide in host memory, for the tensors there of outgoing
            and of incoming, and for the Caller that uses it.
        timeout_ms: how long the stream waits for a peer.
    """

    capturable = True

    def __init__(
        self,
        gpu: Any,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        make: Callable[[list[Tensor], list[Tensor], Caller], WorkerSide | ServerSide],
        timeout_ms: float,
    ) -> None:
        super().__init__(timeout_ms)
        import torch

        self._gpu, self._extension = gpu, _loader.load()
        self._out, self._in = list(outgoing), list(incoming)
        self._out_host = [gpu.host(t) for t in self._out]
        self._in_host = [gpu.host(t) for t in self._in]
        word = torch.zeros(1, dtype=torch.int64)
        self._ring, self._done, self._asked = (gpu.host(word) for _ in range(3))
        self._flags = [gpu.flag(w) for w in (self._ring, self._done, self._asked)]
        self._rung, self._waited = gpu.zeros(1), gpu.zeros(1)
        self._all = [rows_of(t) for t in self._out]
        self._told = gpu.zeros(len(self._all))
        self._rows_out = self.counts(len(self._all))
        self._rows_out.copy_(torch.tensor(self._all, dtype=torch.int64))
        self._short = False  # the last message told its rows
        self._side = make(self._out_host, self._in_host, self)
        self._worker = isinstance(self._side, WorkerSide)
        self._counts = self._side.rows()
        self._rows = [gpu.zeros(len(c)) for c in self._counts]
        gpu.settle()
        self._number = 0  # of the message that the thread is at
        self._sent = 0  # of the newest that has been handed to the node
        self._since: float | None = None  # when the stream was first seen to wait for it
        self._stopping = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="fserver-channel", daemon=True)
        self._thread.start()

    def rows(self) -> list[Tensor]:
        return self._rows

    def check_error(self) -> None:
        """Raises what has ended the channel."""
        if self._error is not None:
            raise self._error.with_traceback(None)  # it would grow with each call

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

    # What the thread does

    def _run(self) -> None:
        try:
            while True:
                self._number += 1
                self._since = None
                self._message()
        except _Ended:
            pass
        except Exception as error:  # to the next call
            self._error = error
        self._extension.set_word(self._done, _NEVER)

    def _message(self) -> None:
        side = self._side
        if isinstance(side, WorkerSide):
            self._wait_for_ring()
            if self._out:
                side.send(self._rows_out.tolist())
                self._sent = self._number
            side.recv()
            self._tell_done()
        elif self._in:
            side.accept()
            self._tell_done()
            self._wait_for_ring()
            side.answer(self._rows_out.tolist())
        else:
            self._wait_for_ring()
            side.send(self._rows_out.tolist())
            self._tell_done()
        self._sent = self._number

    def _wait_for_ring(self) -> None:
        while not self._extension.wait_word(self._ring, self._number, SLICE_MS):
            if self._stopping:
                raise _Ended

    def _tell_done(self) -> None:
        self._extension.set_word(self._done, self._number)

    # What the side in host memory calls

    def staged(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)  # the stream fills them when they have been sent

    def counts(self, n: int) -> Tensor:
        import torch

        return self._gpu.host(torch.zeros(n, dtype=torch.int64))

    def begin(self, call: str) -> None:
        pass  # when the stream does

    def slice_ms(self) -> float:
        return SLICE_MS

    def check(self) -> None:
        if self._stopping:
            raise _Ended
        if int(self._asked) < self._number:
            return
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since > self._timeout / 1000:
            raise TimeoutError(
                f"channel: no message came within timeout_ms={self._timeout:g}, so the channel has "
                f"ended ({REOPEN})"
            )

    # The end

    def finish(self) -> None:
        """Waits for what is enqueued, and until it has been sent; bounded."""
        end = time.monotonic() + _PARTING_S
        if self._gpu.finished(self._timeout / 1000 + _PARTING_S):
            while self._thread.is_alive() and self._sent < int(self._ring):
                if time.monotonic() > end:
                    break
                time.sleep(0.0002)

    def stop(self) -> None:
        """Has the thread end, within a slice."""
        self._stopping = True

    def close(self) -> None:
        self.stop()
        self._thread.join()
        self._side.close()
        if self._gpu.finished(_PARTING_S):
            self._forget()
        else:
            _kept.append(self)
        for side in list(_kept):
            if side._gpu.idle():
                side._forget()
                with contextlib.suppress(ValueError):  # another thread's close
                    _kept.remove(side)

    def _forget(self) -> None:
        """Lets go of what the stream has used: who keeps an error of a call, keeps its frames, and
        so this side."""
        self._out, self._in, self._out_host, self._in_host, self._flags = [], [], [], [], []
