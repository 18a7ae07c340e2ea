"""A process of `fserver bench graph`: a worker or a server with its GPU, or, dry, on the CPU."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..team import SideActor

LIMIT_S = 60.0  # for another side


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
    """What a function that runs in one of the processes is given: streams, graphs and moments. It
    is made with what SideActor takes, whether tensors are on the CPU, and a number for each side in
    shared memory."""

    def __init__(self, *args: Any) -> None:
        *where, self.dry, self._turns = args
        super().__init__(*where)
        self.pair: Any = None  # a library of another, once it is joined
        if not self.dry:  # there are fewer GPUs than sides only where MPS lets them share one
            self.use(self.index % torch.cuda.device_count())

    def run(self, function: Callable[..., Any], what: dict[str, Any]) -> Any:
        """Runs a function of this side."""
        return function(self, **what)

    def channel(self, name: str, key: int, mode: Any, out: Any, into: Any = None) -> Any:
        """A channel for tensors that go out and that come; a server may have it make the latter."""
        keys, how = [key], {"mode": mode, "timeout_ms": 20000.0, "name": name}
        if self.is_worker:
            made = self.nodes[0].channel(out, keys, into, keys, **how)
        else:
            made = self.nodes[0].channel(keys, out, keys, push=into, **how)
        path = "host" if self.dry else mode
        if made.path != path:
            raise RuntimeError(f"the channel goes by {made.path!r}, and not by {path!r}")
        return made

    def together(self) -> None:
        """A barrier that all leave at the same moment: nobody is woken, which would take one of
        them tens of microseconds."""
        self._turns[self.index] = goal = self._turns[self.index] + 1
        end = time.monotonic() + LIMIT_S
        while min(self._turns) < goal:
            if time.monotonic() > end:
                raise TimeoutError("the other side does not come")
            if self.dry:  # nothing is timed exactly, and there may be fewer cores than sides
                time.sleep(1e-4)

    def sync(self) -> None:
        """Waits for all streams."""
        if not self.dry:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """A moment of the current stream."""
        if self.dry:
            return _Mark()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stream(self, priority: int = 0) -> Any:
        """A stream of its GPU."""
        return None if self.dry else torch.cuda.Stream(self.device, priority=priority)

    def on(self, stream: Any) -> Any:
        """Has the stream be the current one."""
        return contextlib.nullcontext() if self.dry else torch.cuda.stream(stream)

    def captured(self, body: Callable[[], object], stream: Any) -> Callable[[], object]:
        """What does again on the current stream what body does."""
        if self.dry:
            return body
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            body()
        return graph.replay


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No collection of garbage while something is timed, as in timeit."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
