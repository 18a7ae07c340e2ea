"""A thread in place of a CUDA stream."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator

import torch
from nodes import LIMIT

Work = Callable[[], None]


class Stream:
    """Does what is enqueued, in its order, in a thread of its own."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Work | None] = queue.Queue()
        self._graph: list[Work] | None = None
        self.gpu = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            self._queue.task_done()

    def put(self, work: Work) -> None:
        if self._graph is None:
            self._queue.put(work)
        else:
            self._graph.append(work)

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Work]]:
        self._graph = graph = []
        yield graph
        self._graph = None

    def replay(self, graph: list[Work]) -> None:
        for work in graph:
            self._queue.put(work)

    def over(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self._queue.unfinished_tasks:
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(LIMIT)
        assert not self._thread.is_alive(), "something in the stream waits for ever"


def void(tensor: torch.Tensor) -> None:
    """Nothing, of what an operation gives back."""


def done(*streams: Stream) -> None:
    assert all(s.over(LIMIT) for s in streams), "a stream waits for ever"
