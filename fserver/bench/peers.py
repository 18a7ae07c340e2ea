"""What the worker and the server of a benchmark do, each in a process of its own.

Methods of the same name run at the same time in both, with the same arguments, and agree on
the number of requests. All tensors are bytes of shape [n] on the CPU. The first 8 bytes of
what is pushed and of what comes back carry a sequence number.
"""

import ctypes
import gc
import resource
import time
from typing import Any

import torch

from .pair import Case
from .report import percentile

TIMEOUT_MS = 60_000
POISON = 0xA5
PERIOD = (1 << 20) + 17  # of the pattern: no multiple of a page, a segment or a chunk


class Pattern:
    """Bytes that look random and depend on a seed; the same in both processes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(273)
        self._base = torch.randint(0, 256, (PERIOD,), dtype=torch.uint8, generator=generator)

    def fill(self, t: torch.Tensor, seed: int) -> None:
        """Writes the pattern of `seed` all over t."""
        for part in t.split(PERIOD):
            torch.add(self._base[: len(part)], seed % 256, out=part)

    def check(self, t: torch.Tensor, seed: int, sequence: int, what: str) -> None:
        """Compares all of t with the pattern of `seed` that starts with `sequence`."""
        want = torch.empty_like(t)
        self.fill(want, seed)
        number(want).value = sequence
        if not torch.equal(t, want):
            at = int((t != want).nonzero()[0])
            raise AssertionError(
                f"{what}: byte {at} of {len(t)} is {int(t[at])}, not {int(want[at])} "
                f"(exchange {sequence})"
            )


def number(t: torch.Tensor) -> ctypes.c_int64:
    """The first 8 bytes of t, read and written in place. Valid as long as t is."""
    return ctypes.c_int64.from_address(t.data_ptr())


def resident() -> int:
    """Resident memory of this process in bytes, after a collection.

    From smaps_rollup, which counts pages; the kernel's running count in statm and status is off
    by up to 32 pages per core.
    """
    gc.collect()
    with open("/proc/self/smaps_rollup") as rollup:
        for line in rollup:
            if line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/smaps_rollup has no line Rss")


class Clock:
    """CPU time of this process, all its threads, as a share of the time that passes."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), self._used()

    @staticmethod
    def _used() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    def percent(self) -> float:
        """Percent of one core since the clock was made."""
        return 100 * (self._used() - self._cpu) / (time.monotonic() - self._wall)


class WorkerPeer:
    """The side that pushes and measures."""

    def __init__(self, node: Any):
        torch.set_num_threads(1)
        self._node = node
        self._pattern = Pattern()
        self._sequence = 0

    def prepare(self, case: Case) -> None:
        """Makes the tensors of a case."""
        self._case = case
        self._out = torch.empty(case.out, dtype=torch.uint8)
        self._back = torch.empty(case.back, dtype=torch.uint8)
        self._push = ([self._out], [case.key])
        self._pull = ([self._back], [case.key]) if case.back else ([], [])
        self._sent = number(self._out)
        # What answers an exchange of a lone push is that it ends.
        self._got = number(self._back) if case.back else self._sent

    def verify(self, seed: int) -> None:
        """One exchange of new data into poisoned memory, compared byte by byte."""
        self._pattern.fill(self._out, seed)
        self._back.fill_(POISON)
        self._exchange(1)
        if self._case.back:
            self._pattern.check(self._back, seed, self._sequence, f"{self._case}: the answer")

    def measure(self, warmup: int, count: int) -> dict[str, float]:
        """Times `count` exchanges, in microseconds from request to completion."""
        self._exchange(warmup)
        samples = self._exchange(count, sampled=True)
        samples.sort()
        return {
            "p50_us": percentile(samples, 50) / 1e3,
            "p99_us": percentile(samples, 99) / 1e3,
            "min_us": samples[0] / 1e3,
            "mean_us": sum(samples) / len(samples) / 1e3,
        }

    def run(self, count: int) -> None:
        """`count` exchanges."""
        self._exchange(count)

    def memory(self) -> int:
        """Resident memory in bytes."""
        return resident()

    def blocked_get_batch(self, seconds: float) -> float:
        """CPU percent while nothing is called and the server waits for a request."""
        clock = Clock()
        time.sleep(seconds)
        return clock.percent()

    def blocked_wait(self, seconds: float) -> float:
        """CPU percent inside a wait that lasts that long."""
        self._sequence += 1
        self._sent.value = self._sequence
        clock = Clock()
        handle = self._node.push_pull(*self._push, *self._pull)
        self._node.wait(handle, int(seconds * 1e3) + TIMEOUT_MS)
        return clock.percent()

    def _exchange(self, count: int, sampled: bool = False) -> list[int]:
        """Does `count` exchanges; writing and checking the number is not in the times (ns)."""
        push_pull, wait, now = self._node.push_pull, self._node.wait, time.perf_counter_ns
        push, push_keys = self._push
        pull, pull_keys = self._pull
        sent, got = self._sent, self._got
        samples = []
        for i in range(self._sequence + 1, self._sequence + 1 + count):
            sent.value = i
            start = now()
            handle = push_pull(push, push_keys, pull, pull_keys)
            wait(handle, TIMEOUT_MS)
            end = now()
            if sampled:
                samples.append(end - start)
            if got.value != i:
                raise AssertionError(
                    f"{self._case}: exchange {i} brought the answer to {got.value}"
                )
        self._sequence += count
        return samples


class ServerPeer:
    """The side that answers: a push_pull with what was pushed, a pull with a tensor of its own."""

    def __init__(self, node: Any):
        torch.set_num_threads(1)
        self._node = node
        self._pattern = Pattern()
        self._sequence = 0

    def prepare(self, case: Case) -> None:
        """Makes the tensors of a case."""
        self._case = case
        self._answer = torch.empty(case.back if case.op == "pull" else 8, dtype=torch.uint8)

    def verify(self, seed: int) -> None:
        """One exchange whose request is compared byte by byte."""
        self._pattern.fill(self._answer, seed)
        handler, tensors = self._next()
        self._pattern.check(tensors[0], seed, self._sequence, f"{self._case}: the request")
        self._reply(handler, tensors)

    def measure(self, warmup: int, count: int) -> None:
        """Answers as many requests as the worker measures."""
        self.run(warmup + count)

    def run(self, count: int) -> None:
        """`count` exchanges."""
        pull, push = self._case.op == "pull", self._case.op == "push"
        node, answer, stamp = self._node, [self._answer], number(self._answer)
        for i in range(self._sequence + 1, self._sequence + 1 + count):
            batch = node.get_batch(timeout_ms=TIMEOUT_MS)
            if not batch:
                raise AssertionError(f"{self._case}: exchange {i}: no request came")
            handler, tensors, _ = batch[0]
            if push:
                if number(tensors[0]).value != i:
                    raise AssertionError(f"{self._case}: exchange {i} brought other data")
                node.respond([], handler)
            elif pull:
                stamp.value = i
                node.respond(answer, handler)
            else:
                node.respond(tensors, handler)
        self._sequence += count

    def memory(self) -> int:
        """Resident memory in bytes."""
        return resident()

    def blocked_get_batch(self, seconds: float) -> float:
        """CPU percent inside a get_batch that lasts that long."""
        clock = Clock()
        batch = self._node.get_batch(timeout_ms=int(seconds * 1e3))
        if batch:
            raise AssertionError("a request came while there was none")
        return clock.percent()

    def blocked_wait(self, seconds: float) -> float:
        """CPU percent while a request is left unanswered for so long."""
        handler, tensors = self._next()
        clock = Clock()
        time.sleep(seconds)
        percent = clock.percent()
        self._reply(handler, tensors)
        return percent

    def _next(self) -> tuple[Any, list[torch.Tensor]]:
        self._sequence += 1
        batch = self._node.get_batch(timeout_ms=TIMEOUT_MS)
        if not batch:
            raise AssertionError(f"{self._case}: exchange {self._sequence}: no request came")
        return batch[0][0], batch[0][1]

    def _reply(self, handler: Any, tensors: list[torch.Tensor]) -> None:
        if self._case.op == "push":
            self._node.respond([], handler)
        elif self._case.op == "pull":
            number(self._answer).value = self._sequence
            self._node.respond([self._answer], handler)
        else:
            self._node.respond(tensors, handler)


ROLES = {"worker": WorkerPeer, "server": ServerPeer}
