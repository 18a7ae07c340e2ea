"""What the processes of a benchmark do with their nodes.

Methods of the same name run at the same time in all of them, with the same arguments, and agree
on the number of exchanges. All tensors are bytes of shape [n], on the CPU or on a GPU. In every
exchange the first 8 bytes of the first tensor that is pushed, and of all that come back, carry its
number. On a GPU a server handles no numbers in timed exchanges: that takes longer than they do.
"""

import ctypes
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

import torch

import fserver

from .crew import Case, Factory, Place
from .errors import WrongDataError
from .report import figures, parts

TIMEOUT_MS = 60_000
# Requests: handler, tensors and keys of each.
Batch = list[tuple[int, list[torch.Tensor], list[int]]]

POISON = 0xA5
PERIOD = (1 << 20) + 17  # of the pattern: no multiple of a page, a segment or a chunk


class Pattern:
    """Bytes that look random and depend on a seed; the same in all processes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(273)
        self._base = torch.randint(0, 256, (PERIOD,), dtype=torch.uint8, generator=generator)

    def fill(self, t: torch.Tensor, seed: int) -> None:
        """Writes the pattern of `seed` all over t."""
        self._base = self._base.to(t.device)
        for part in t.split(PERIOD):
            torch.add(self._base[: len(part)], seed % 256, out=part)

    def like(self, t: torch.Tensor, seed: int, sequence: int) -> torch.Tensor:
        """The pattern of `seed` that starts with `sequence`, as long as t and where t is."""
        made = torch.empty_like(t)
        self.fill(made, seed)
        number(made).value = sequence
        return made

    def check(self, t: torch.Tensor, seed: int, sequence: int, what: str) -> None:
        """Raises WrongDataError if t is not the pattern of `seed` that starts with `sequence`."""
        difference = first_difference(t, self.like(t, seed, sequence))
        if difference:
            raise WrongDataError(f"{what}: {difference} (exchange {sequence})")


def first_difference(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Where two tensors of bytes, shape [n], differ first."""
    if torch.equal(got, want):
        return None
    at = int((got != want).nonzero()[0])
    return f"byte {at} of {len(got)} is {int(got[at])}, not {int(want[at])}"


def number(t: torch.Tensor) -> "ctypes.c_int64 | DeviceNumber":
    """The first 8 bytes of t, read and written in place. Valid as long as t is."""
    return DeviceNumber(t) if t.is_cuda else ctypes.c_int64.from_address(t.data_ptr())


class DeviceNumber:
    """The first 8 bytes of a tensor on a GPU. To write them waits for the GPU too."""

    def __init__(self, t: torch.Tensor):
        self._word = t[:8].view(torch.int64)

    @property
    def value(self) -> int:
        return int(self._word)

    @value.setter
    def value(self, value: int) -> None:
        self._word.fill_(value)
        torch.cuda.synchronize(self._word.device)


def own_seed(seed: int, role: str, rank: int, position: int) -> int:
    """The pattern of a tensor: another one for each node (of 256) and for the next in its list."""
    return seed + position + 37 * rank + (128 if role == "server" else 0)


class Actor:
    """The nodes of one process, all workers or all servers."""

    def __init__(self, make: Factory):
        torch.set_num_threads(1)
        self._make = make
        self.nodes: list[Any] = []
        self.places: list[Place] = []
        self.case = Case("", ())
        self.sequence = 0  # exchanges so far
        self.pattern = Pattern()

    def connect(self, places: Sequence[Place]) -> None:
        """Makes the nodes. All at once: each waits for the whole cluster."""
        self.places, self.sequence = list(places), 0
        self.nodes = self._together(self._make, places)

    def leave(self) -> None:
        nodes, self.nodes = self.nodes, []
        self._together(lambda node: node.__exit__(None, None, None), nodes)

    def close(self) -> None:
        """After a failure: the others are not to wait for these nodes."""
        error = RuntimeError("the benchmark failed")
        self._together(lambda node: node.__exit__(RuntimeError, error, None), self.nodes)

    @staticmethod
    def _together(call: Any, items: Sequence[Any]) -> list[Any]:
        if len(items) < 2:
            return [call(item) for item in items]
        with ThreadPoolExecutor(len(items)) as pool:
            return list(pool.map(call, items))

    def device_of(self, case: Case) -> torch.device:
        """Where the tensors of a case are."""
        gpu = self.places[0].gpu or 0
        return torch.device("cpu") if case.device == "cpu" else torch.device("cuda", gpu)

    def check_numbers(self, numbers: Sequence[Any], i: int) -> None:
        """What came is of exchange i."""
        for got in numbers:
            if got.value != i:
                raise WrongDataError(f"{self.case}: exchange {i} brought the data of {got.value}")

    def links(self, patience: float = 5) -> list[str]:
        """The transports that this process's nodes use, once all members of connections that are
        made of several are connected, or after so many seconds."""
        end = time.monotonic() + patience
        while True:
            links = [link for node in self.nodes for link in node.links()]
            missing = any(m.reason for link in links for m in link.members)
            if not missing or time.monotonic() >= end:
                return sorted({link.transport for link in links})
            time.sleep(0.01)

    def sent(self) -> list[tuple[str, int]]:
        """The members of the first connection, if it is made of several, with their bytes."""
        members = self.nodes[0].links()[0].members
        return [(f"{m.interface} {m.transport}", m.sent) for m in members]


class Request:
    """The tensors of one worker for one stage."""

    def __init__(self, node: Any, place: Place, case: Case, stage: int, device: torch.device):
        self.node, self.rank, self.stage = node, place.rank, stage
        empty = fserver.empty_shared if case.shared else partial(torch.empty, device=device)
        back = case.back * place.servers
        self.push = [empty(n, dtype=torch.uint8) for n in case.out]
        self.pull = [torch.empty(n, dtype=torch.uint8, device=device) for n in back]
        first = case.key + stage * max(len(case.out), len(case.back))
        self.push_keys = list(range(first, first + len(case.out)))
        self.pull_keys = list(range(first, first + len(case.back)))
        self.sent = number(self.push[0])
        # What answers a lone push is that it ends.
        numbered = case.device == "cpu" or case.echoes
        # The first tensor of a push has the number, so of an echo the first has it too.
        answers = self.pull[:: len(case.back)] if case.echoes else self.pull
        self.got = [number(t) for t in answers if numbered] or [self.sent]
        # With no keyword, because a partial call with one takes longer.
        sent = self.push, self.push_keys, self.pull, self.pull_keys, True
        self.post: Callable[[], Any] = partial(node.push_pull, *sent)


class WorkerActor(Actor):
    """Workers that push at the same time, and measure until the last of them is done."""

    def prepare(self, case: Case) -> None:
        self.case, device = case, self.device_of(case)
        own, stages = list(zip(self.nodes, self.places, strict=True)), range(case.stages)
        self.requests = [[Request(*at, case, stage, device) for at in own] for stage in stages]

    def verify(self, seed: int) -> None:
        """An exchange of each stage, of new data into poisoned memory, compared byte by byte."""
        first, pattern = self.sequence + 1, self.pattern
        for request in itertools.chain(*self.requests):
            for j, t in enumerate(request.push):
                own = own_seed(seed, "worker", request.rank, j)
                t.copy_(pattern.like(t, own, first + request.stage))
            for t in request.pull:
                t.fill_(POISON)
        self.run(self.case.stages)
        for request in itertools.chain(*self.requests):
            for k, t in enumerate(request.pull):
                server, j = divmod(k, len(self.case.back))
                whose = ("worker", request.rank) if self.case.echoes else ("server", server)
                what = f"{self.case}: answer {j} of server {server} to worker {request.rank}"
                pattern.check(t, own_seed(seed, *whose, j), first + request.stage, what)

    def measure(self, warmup: int, count: int) -> dict[str, Any]:
        """Times `count` units of exchanges. Where a unit is all layers and stages of a model, also
        what it takes, and the parts of a round trip."""
        self.run(warmup * self.case.unit)
        if self.case.unit == 1:
            return figures(self.run(count))
        samples, steps, traces = list[int](), list[int](), []
        for _ in range(count):
            start = time.perf_counter_ns()
            samples += self.run(self.case.unit)
            steps.append(time.perf_counter_ns() - start)
            traces += [self.nodes[0].fetch_trace(handle) for handle in self.handles]
        return {**figures(samples), "step_ms": median(steps) / 1e6, "parts_us": parts(traces)}

    def run(self, count: int) -> list[int]:
        """`count` exchanges, of the stages in turn; gives their times in ns. To write and check the
        numbers is not in them. With one worker, nothing but the two calls is. Keeps the handles."""
        now, samples, self.handles = time.perf_counter_ns, list[int](), list[Any]()
        numbers = range(self.sequence + 1, self.sequence + 1 + count)
        self.sequence += count
        calls = [
            (all_of, partial(_post, all_of), partial(_wait, all_of))
            if all_of[1:]
            else (all_of, all_of[0].post, all_of[0].node.wait)
            for all_of in self.requests
        ]
        for i, (requests, post, wait) in zip(numbers, itertools.cycle(calls), strict=False):
            for request in requests:
                request.sent.value = i
            start = now()
            handle = post()
            wait(handle, TIMEOUT_MS)
            samples.append(now() - start)
            self.handles.append(handle)
            for request in requests:
                self.check_numbers(request.got, i)
        return samples


def _post(requests: Sequence[Request]) -> list[int]:
    return [request.post() for request in requests]


def _wait(requests: Sequence[Request], handles: Sequence[int], limit_ms: int) -> None:
    for request, handle in zip(requests, handles, strict=True):
        request.node.wait(handle, limit_ms)


class ServerActor(Actor):
    """A server that answers a batch after the other."""

    def prepare(self, case: Case) -> None:
        """Makes the tensors of a case; one that echoes needs none."""
        self.case = case
        new = partial(torch.empty, dtype=torch.uint8, device=self.device_of(case))
        self.answers = [[new(n) for n in case.back if not case.echoes] for _ in range(case.stages)]
        self.stamps = [[number(t) for t in answer] for answer in self.answers]

    def verify(self, seed: int) -> None:
        """An exchange of each stage whose requests are compared byte by byte."""
        # In new tensors: between two hosts, nobody knows whether the last answers have been sent.
        self.prepare(self.case)
        for answer in self.answers:
            for j, t in enumerate(answer):
                self.pattern.fill(t, own_seed(seed, "server", self.places[0].rank, j))

        def check(batch: Batch, i: int) -> None:
            for rank, (_, tensors, _) in enumerate(batch):
                for j, t in enumerate(tensors):
                    what = f"{self.case}: tensor {j} of worker {rank}"
                    self.pattern.check(t, own_seed(seed, "worker", rank, j), i, what)

        self.run(self.case.stages, check)

    def measure(self, warmup: int, count: int) -> None:
        self.run((warmup + count) * self.case.unit)

    def run(self, count: int, check: Callable[[Batch, int], None] | None = None) -> None:
        """`count` exchanges, with as little as can be between the calls."""
        get_batch, respond = self.nodes[0].get_batch, self.nodes[0].respond
        echo = self.case.echoes
        numbered = check is not None or self.case.device == "cpu"
        pushed = numbered and not self.case.back
        numbers = range(self.sequence + 1, self.sequence + 1 + count)
        stages = itertools.cycle(zip(self.answers, self.stamps, strict=True))
        for i, (answer, stamps) in zip(numbers, stages, strict=False):
            batch = get_batch(TIMEOUT_MS)
            if not batch:
                raise AssertionError(f"{self.case}: exchange {i}: no request came")
            if check:
                check(batch, i)
            if numbered:
                for stamp in stamps:
                    stamp.value = i
            for request in batch:
                if pushed:
                    self.check_numbers([number(request[1][0])], i)
                respond(request[1] if echo else answer, request[0], need_event=False)
            del batch, request  # now, while the worker is busy, not before the next answer
        self.sequence += count
