"""The workers of `fserver bench af`."""

import time
from collections import deque
from typing import Any

from . import stamps
from .peers import TIMEOUT_MS, WorkerPart, figures


class LayersPart(WorkerPart):
    """One worker that goes through layers and stages; `count` counts steps through all layers."""

    def plan(self, layers: int, in_flight: int) -> None:
        """How many layers, and how many stages are under way at a time."""
        self._layers, self._in_flight = layers, in_flight

    def measure(self, warmup: int, count: int) -> dict[str, Any]:
        """Times each stage of each layer in `count` steps."""
        for _ in range(warmup):
            self._step([])
        samples: list[int] = []
        steps, traces = [], []
        fetch = self.nodes[0].fetch_trace
        for _ in range(count):
            start = time.perf_counter_ns()
            handles = self._step(samples)
            steps.append(time.perf_counter_ns() - start)
            traces += [fetch(handle) for handle in handles]
        return {
            **figures(samples),
            "step_ms": sorted(steps)[len(steps) // 2] / 1e6,
            "parts_us": stamps.medians(traces),
        }

    def _step(self, samples: list[int]) -> list[int]:
        """All layers once; adds the time of each round trip, in nanoseconds, and gives their
        handles."""
        now = time.perf_counter_ns
        wait = self.nodes[0].wait
        lanes = [lanes[0] for lanes in self.lanes]
        under_way: deque = deque()
        handles = []

        def finish() -> None:
            i, lane, start, handle = under_way.popleft()
            wait(handle, TIMEOUT_MS)
            samples.append(now() - start)
            self.check_numbers(lane, i)

        for _ in range(self._layers):
            for lane in lanes:
                if len(under_way) == self._in_flight:
                    finish()
                self.sequence += 1
                lane.sent.value = self.sequence
                start = now()
                handle = lane.post()
                under_way.append((self.sequence, lane, start, handle))
                handles.append(handle)
        while under_way:
            finish()
        return handles
