"""The worker of `fserver bench af`, and the parts of its round trips."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

from .actors import WorkerActor
from .af import PARTS
from .remote import CommandingWorker
from .report import figures


class LayersActor(WorkerActor):
    """One worker that goes through all stages of all layers; `count` counts such steps."""

    def measure(self, warmup: int, count: int) -> dict[str, Any]:
        """Times each stage of each layer in `count` steps."""
        samples, steps, traces = list[int](), [], []
        self.run(warmup * self.case.unit)
        for _ in range(count):
            start = time.perf_counter_ns()
            samples += self.run(self.case.unit)
            steps.append(time.perf_counter_ns() - start)
            traces += [self.nodes[0].fetch_trace(handle) for handle in self.handles]
        step_ms = statistics.median(steps) / 1e6
        return {**figures(samples), "step_ms": step_ms, "parts_us": medians(traces)}


class FarLayersActor(CommandingWorker, LayersActor):
    """The same with a server on another host."""


def parts(t: Sequence[int]) -> dict[str, int]:
    """Nanoseconds of each part of a round trip with these stamps."""
    return {
        name: sum(t[at[i]] - t[at[i + 1]] for i in range(0, len(at), 2))
        for name, (_, at) in PARTS.items()
    }


def medians(traces: Sequence[Sequence[int]]) -> dict[str, float]:
    """Of each part, in microseconds."""
    found = [parts(t) for t in traces]
    return {name: statistics.median(p[name] for p in found) / 1e3 for name in PARTS}
