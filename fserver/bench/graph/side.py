"""A process of `fserver bench graph`: a worker or a server with its GPU, or, dry, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..team import SideActor


class _Mark:
    """A moment, in place of an event."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: _Mark) -> float:
        return (later.at - self.at) * 1e3

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class GraphSide(SideActor):
    """Gives streams, graphs and moments to a function that runs in one of the processes. `dry`:
    tensors are on the CPU. `turns`: a number for each side, in shared memory."""

    def __init__(self, *args: Any) -> None:
        *where, self.dry, self._turns = args
        super().__init__(*where)
        self.library: Any = None  # another one, once it is joined
        self.peers = range(self.workers, self.count) if self.is_worker else range(self.workers)
        if not self.dry:  # there are fewer GPUs than sides only where MPS lets them share one
            self.use(self.index % torch.cuda.device_count())

    def run(self, function: Callable[..., Any], what: dict[str, Any]) -> Any:
        return function(self, **what)

    def channel(
        self, key: int, mode: Any, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]
    ) -> Any:
        """Opens a channel of fserver for tensors that go out and tensors that come in."""
        keys, how = [key], {"mode": mode, "timeout_ms": 20000.0, "name": f"stage {key}"}
        if self.is_worker:
            made = self.nodes[0].channel(out, keys, into, keys, **how)
        else:
            made = self.nodes[0].channel(keys, out, keys, push=into, **how)
        path = "host" if self.dry else mode
        if made.path != path:
            raise RuntimeError(f"the channel's path is {made.path!r}, want {path!r}")
        return made

    def together(self) -> None:
        """A barrier that all sides leave at the same moment. They poll, because waking a process
        takes tens of microseconds."""
        self._turns[self.index] += 1
        while min(self._turns) < self._turns[self.index]:
            if self.dry:  # nothing is timed exactly, and there may be fewer cores than sides
                time.sleep(1e-4)

    def sync(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """Returns a moment of the current stream."""
        if self.dry:
            return _Mark()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stream(self, priority: int = 0) -> Any:
        """Makes a stream of the GPU. Dry, it is None, which torch.cuda.stream ignores."""
        return None if self.dry else torch.cuda.Stream(self.device, priority=priority)

    def captured(self, body: Callable[[], object], stream: Any) -> Callable[[], object]:
        """Captures what body enqueues; returns a function that replays it."""
        if self.dry:
            return body
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            body()
        return graph.replay
