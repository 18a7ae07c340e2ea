"""The processes of `fserver bench graph`: one for each GPU, which run a function side by side."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import fserver

START_S = 60.0  # torch, and a context
LIMIT_S = 60.0  # for another side
PARTING_S = 10.0  # for the other sides, once one has failed


class _Mark:
    """A moment, in place of an event."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: _Mark) -> float:
        return (later.at - self.at) * 1e3

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Side:
    """One process: a worker or a server, and its GPU.

    Attributes:
        index: number among all; the workers come first.
        rank: number among those of its role.
        scheduler: address for its node.
        folder: of this user alone, and common to all sides.
    """

    def __init__(
        self,
        index: int,
        shape: tuple[int, int],
        dry: bool,
        barrier: Any,
        cells: Any,
        turns: Any,
        folder: str,
    ):
        self.index, self.dry, self.folder = index, dry, Path(folder)
        self.workers, self.servers = shape
        self.is_worker = index < self.workers
        self.rank = index if self.is_worker else index - self.workers
        # There are fewer GPUs than processes only where MPS lets them share one.
        gpus = torch.cuda.device_count()
        self.device = torch.device("cpu") if dry else torch.device("cuda", index % gpus)
        self.scheduler = ""
        self._barrier, self._cells, self._turns = barrier, cells, turns

    def barrier(self) -> None:
        self._barrier.wait(LIMIT_S)

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

    def exchange(self, mine: Any) -> Any:
        """Gives the other one of two sides an object and takes its own."""
        (self.folder / f"given {self.index}").write_bytes(pickle.dumps(mine))
        self.barrier()
        theirs = pickle.loads((self.folder / f"given {1 - self.index}").read_bytes())
        self.barrier()
        return theirs

    def share(self, value: float) -> list[float]:
        """The values of all sides."""
        self._cells[self.index] = value
        self.barrier()
        values = list(self._cells)
        self.barrier()
        return values

    def sync(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def settle(self) -> None:
        """Waits for the current stream."""
        if not self.dry:
            torch.cuda.current_stream().synchronize()

    def mark(self) -> Any:
        """A moment of the current stream."""
        if self.dry:
            return _Mark()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stream(self, priority: int = 0) -> Any:
        return None if self.dry else torch.cuda.Stream(self.device, priority=priority)

    def on(self, stream: Any) -> Any:
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
    def node(self, **options: Any) -> Iterator[Any]:
        kind: Any = fserver.Worker if self.is_worker else fserver.Server
        own = kind(
            scheduler=self.scheduler,
            workers=self.workers,
            servers=self.servers,
            node_rank=self.rank,
            init_timeout=20,
            connect=False,
            settings={"FSERVER_LOG": "error"},
            **{"backend": "CPU", **options},
        )
        try:
            own.connect()
            yield own
        finally:
            own.close()


def _child(index: int, count: int, pipe: Any, made: tuple[Any, ...]) -> None:
    with contextlib.suppress(OSError):  # other processes are not in the way of the timings
        cores = sorted(os.sched_getaffinity(0))
        each = len(cores) // count
        if each >= 4:
            os.sched_setaffinity(0, cores[index * each : (index + 1) * each])
    faulthandler.dump_traceback_later(START_S, exit=True)
    side = Side(index, *made)
    try:
        if not side.dry:
            torch.cuda.set_device(side.device)
            torch.ones(1, device=side.device).add_(1).item()
        else:
            torch.set_num_threads(1)
        pipe.send((True, None))
        while True:
            faulthandler.cancel_dump_traceback_later()
            function, options, side.scheduler, limit = pipe.recv()
            faulthandler.dump_traceback_later(limit, exit=True)
            pipe.send((True, function(side, **options)))
    except EOFError:
        return
    except BaseException:
        made[2].abort()
        pipe.send((False, traceback.format_exc()))


class Crew:
    """The processes. After an error they are not used again."""

    def __init__(self, shape: tuple[int, int], dry: bool, exact: bool = False) -> None:
        # Without GPUs, forks of a process that has imported torch start sooner. With `exact`, a
        # process needs an environment of its own from the start (crew.by_the_byte).
        forked = dry and not exact
        context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
        if forked:
            context.set_forkserver_preload([__name__])
        self.shape, count = shape, sum(shape)
        self.folder = tempfile.TemporaryDirectory(prefix="fserver-graph-")
        cells = context.Array("d", count)
        turns = context.RawArray("Q", count)
        made = (shape, dry, context.Barrier(count), cells, turns, self.folder.name)
        self.pipes, self.processes = [], []
        for index in range(count):
            here, there = context.Pipe()
            process = context.Process(
                target=_child, args=(index, count, there, made), daemon=True, name=f"side {index}"
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self._collect(START_S + 5)

    def _collect(self, limit: float) -> list[Any]:
        """What each has to give. Once one has failed, the others have PARTING_S."""
        results: dict[int, Any] = {}
        errors = []
        missing = {pipe: index for index, pipe in enumerate(self.pipes)}
        end = time.monotonic() + limit
        while missing:
            ready = multiprocessing.connection.wait([*missing], max(0.0, end - time.monotonic()))
            if not ready:
                errors.append(f"sides {[*missing.values()]} have not finished")
                break
            for pipe in [one for one in missing if one in ready]:
                index = missing.pop(pipe)
                try:
                    good, results[index] = pipe.recv()
                except (EOFError, OSError):
                    self.processes[index].join(2)
                    status = f"exit status {self.processes[index].exitcode}"
                    good, results[index] = False, f"{status}: crashed, or hung and was ended"
                if not good:
                    errors.append(f"side {index}: {results[index]}")
                    end = min(end, time.monotonic() + PARTING_S)
        if errors:
            self.close()
            raise RuntimeError("\n".join(errors))
        return [results[i] for i in sorted(results)]

    def run(self, function: Callable[..., Any], limit: float, options: dict[str, Any]) -> list[Any]:
        """Runs a function on all sides with a cluster of its own; gives all results."""
        workers, servers = self.shape
        scheduler = fserver.Scheduler(
            scheduler="127.0.0.1:0",
            workers=workers,
            servers=servers,
            backend="CPU",
            connect=False,
            settings={"FSERVER_LOG": "error"},
        )
        try:
            for pipe in self.pipes:
                pipe.send((function, options, scheduler.scheduler, limit))
            return self._collect(limit + 5)
        finally:
            scheduler.close()

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(3)
            if process.is_alive():
                process.kill()
                process.join(5)
        self.folder.cleanup()
