"""Processes with a stream each that exchange objects: those of other libraries and of graphs."""

from __future__ import annotations

import ast
import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .actors import Actor
from .crew import TIMEOUT, Crew, Factory, Member

WAIT = timedelta(seconds=30)
CORES = 4  # of a process, at least


class Teammate(Actor):
    """One of the processes. `index` is its number among all, of which the workers come first, and
    `rank` that among those of its role. Its tensors are on a GPU, or on the CPU. The store
    at `at` passes what they exchange; `turns` is a number for each, in shared memory."""

    def __init__(
        self,
        make: Factory,
        index: int,
        shape: tuple[int, int],
        at: tuple[str, int],
        gpu: int | None = None,
        turns: Any = None,
        timeout: timedelta = WAIT,
    ):
        super().__init__(make)
        self.index, self.count = index, sum(shape)
        self.workers, self.servers = shape
        self.is_worker = index < self.workers
        self.rank = index if self.is_worker else index - self.workers
        self.peers = range(self.workers, self.count) if self.is_worker else range(self.workers)
        self.library: Any = None  # another one, once it is joined
        self.store = dist.TCPStore(*at, is_master=False, timeout=timeout)
        self._exchanges, self._turns = itertools.count(), turns
        self.on_gpu, self.device = gpu is not None, torch.device("cpu")
        if gpu is not None:
            self.device = torch.device("cuda", gpu)
            torch.cuda.set_device(self.device)
            torch.ones(1, device=self.device).add_(1).item()

    def run(self, function: Callable[..., Any], what: dict[str, Any]) -> Any:
        return function(self, **what)

    def exchange(self, mine: Any) -> list[Any]:
        """What each of the processes gives, in their order: literals of Python."""
        turn = next(self._exchanges)
        self.store.set(f"{turn}/{self.index}", repr(mine))
        given = [self.store.get(f"{turn}/{i}") for i in range(self.count)]
        return [ast.literal_eval(text.decode()) for text in given]

    def barrier(self) -> None:
        self.exchange(None)

    def together(self) -> None:
        """A barrier that all leave at the same moment: waking a process would take tens of µs."""
        self._turns[self.index] += 1
        while min(self._turns) < self._turns[self.index]:
            pass

    def channel(
        self, key: int, mode: Any, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]
    ) -> Any:
        """Opens a channel of fserver for tensors that go out and tensors that come in."""
        keys, how = [key], {"mode": mode, "timeout_ms": 20000.0, "name": f"stage {key}"}
        if self.is_worker:
            made = self.nodes[0].channel(out, keys, into, keys, **how)
        else:
            made = self.nodes[0].channel(keys, out, keys, push=into, **how)
        if made.path != mode:
            raise RuntimeError(f"the channel's path is {made.path!r}, want {mode!r}")
        return made

    def settle(self) -> None:
        """Waits for the current stream."""
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()

    def sync(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stream(self, priority: int = 0) -> Any:
        """Makes a stream of the GPU. On the CPU it is None, which torch.cuda.stream ignores."""
        return torch.cuda.Stream(self.device, priority=priority) if self.on_gpu else None

    def captured(self, body: Callable[[], object], stream: Any) -> Callable[[], object]:
        """Captures what body enqueues; returns a function that replays it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            body()
        return graph.replay


class Team(Crew):
    def __init__(
        self,
        shape: tuple[int, int],
        gpus: Sequence[int] | None = None,
        cores: Iterable[int] = (),
        actor: type[Teammate] = Teammate,
        variables: Mapping[str, str] | None = None,
        limit: float = TIMEOUT,
    ):
        """Starts so many workers and servers on these GPUs, or on the CPU, with these variables in
        their environment. Each has an equal share of the cores, if that is CORES or more."""
        host, count, every = "127.0.0.1", sum(shape), sorted(cores)
        each = len(every) // count
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        at, turns = (host, self._store.port), multiprocessing.RawArray("Q", count)
        members = []
        for i in range(count):
            role, rank = ("worker", i) if i < shape[0] else ("server", i - shape[0])
            mine = every[i * each : (i + 1) * each] if each >= CORES else []
            own = i, shape, at, gpus[i] if gpus else None, turns
            how: dict[str, Any] = {"args": own, "variables": variables or {}}
            members.append(Member(f"{role} {rank}", actor, role, mine, **how))
        super().__init__(members, limit)
