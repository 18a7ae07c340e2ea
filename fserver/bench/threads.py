"""`fserver bench threads`: threads of one worker, each with a micro-batch of its own."""

import contextlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from . import report
from .actors import WorkerActor
from .crew import TIMEOUT, Case, Crew, Nodes, pair
from .errors import BenchError
from .options import parser, positive, seconds_of, size, transport_of
from .run import Run

COLUMNS = (
    report.TRANSPORT,
    report.Column("threads", 7, "threads"),
    report.number("µs/exchange", 11, "per_exchange_us", 2),
    report.number("p50", 8, "p50_us", 2),
    report.number("p99", 8, "p99_us"),
)
BESIDE = {
    "links": "a thread that calls links() every 10 ms",
    "doctor": "`fserver doctor --json`, again and again",
}
DOCTOR = [sys.executable, "-m", "fserver", "doctor", "--json"]
PARSER = parser(
    "threads",
    "Compares two Python threads of one worker with one thread. Each thread calls push_pull and "
    "wait in a loop, with tensors and keys of its own. The table shows the elapsed time divided by "
    "the number of exchanges of all threads. A ratio below 1 means that the threads overlap, a "
    "ratio above 1 that they slow each other. With --beside, there is one thread, and something "
    "else runs in every second round. A doctor is a new Python process each time and uses a whole "
    "core, so it slows the pair if no core is free. Processes are "
    "pinned only with --cores.",
    ("--size", size, "4K", "bytes in each direction"),
    ("--beside", tuple(BESIDE), None, "compare one thread alone with one beside this"),
    seconds_of(None, "length of a round (default 0.2; beside a doctor, which takes one or two, 2)"),
    transport_of("tcp"),
    ("--rounds", positive, 7, "number of rounds"),
    ("--iters", positive, None, "exchanges in a round, instead of --seconds"),
)


class ThreadsActor(WorkerActor):
    """A worker whose stages belong to a thread each."""

    def asked(self, count: int) -> dict[str, float]:
        """One thread makes `count` exchanges, while another asks for links() every 10 ms."""

        def ask(done: threading.Event) -> None:
            while not done.wait(0.01):
                self.nodes[0].links()

        with _meanwhile(ask):
            return self.together(1, count)

    def together(self, threads: int, count: int) -> dict[str, float]:
        """So many threads make `count` exchanges each, one after the other: the time of all of it
        for an exchange, and that of one as its thread sees it."""
        gate, before = threading.Barrier(threads + 1), self.sequence

        def alone(stage: int) -> list[int]:
            gate.wait()
            return self._alone(self.requests[stage][0], count, sampled=True)

        with ThreadPoolExecutor(threads) as pool:
            running = [pool.submit(alone, stage) for stage in range(threads)]
            gate.wait()
            start = time.perf_counter_ns()
            samples = [took for each in running for took in each.result()]
            end = time.perf_counter_ns()
        self.sequence = before + threads * count  # as the server has counted them
        found = report.figures(samples)
        return {
            "per_exchange_us": (end - start) / 1e3 / len(samples),
            "p50_us": found["p50_us"],
            "p99_us": found["p99_us"],
        }


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    options = PARSER.parse_args(argv)
    # Two threads on one core take turns: processes are not pinned, unless --cores says so.
    with Run("threads", options, nodes, COLUMNS, options.rounds, pin=False) as run:
        two = run.enter_context(pair(nodes, options.transport, run.cores, ThreadsActor))
        two.all("prepare", Case("push_pull", (options.size,), (options.size,), stages=2, unit=2))
        two.all("verify", 0)
        transport = two.transport()
        rounds, count = _measure(run, two)
        two.all("verify", 1)
        run.header()
        names = (1, options.beside or 2)
        for threads, found in zip(names, zip(*rounds, strict=True), strict=True):
            row = {key: statistics.median(each[key] for each in found) for key in found[0]}
            run.add({"transport": transport, "threads": threads, "iters": count, **row})
        ratio = statistics.median(b["per_exchange_us"] / a["per_exchange_us"] for a, b in rounds)
        beside = f"beside {BESIDE[options.beside]}" if options.beside else "of two threads"
        print(f"\nan exchange {beside} takes {ratio:.2f} times as long as one of one thread alone")
        run.finish(ratio=round(ratio, 3))
    return 0


def _measure(run: Run, two: Crew) -> tuple[list[tuple[dict[str, float], dict[str, float]]], int]:
    """The figures of both ways in each round, and the exchanges of a round."""
    options, rounds = run.options, []
    trial = _run(two, 200, "together", 1, 200)["per_exchange_us"]
    seconds = options.seconds or (2.0 if options.beside == "doctor" else 0.2)
    count = options.iters or max(100, int(seconds * 1e6 / trial))
    for _ in range(options.rounds):
        alone = _run(two, count, "together", 1, count)
        if options.beside == "links":
            other = _run(two, count, "asked", count)
        elif options.beside == "doctor":
            with _meanwhile(_doctors):
                other = _run(two, count, "together", 1, count)
        else:
            other = _run(two, 2 * count, "together", 2, count)
        rounds.append((alone, other))
        run.step()
    return rounds, count


def _run(two: Crew, requests: int, method: str, *args: int) -> dict[str, float]:
    """The figures of a method of the worker, while the server answers so many requests."""
    worker, server = two.peers
    server.tell("run", requests)
    worker.tell(method, *args)
    found: dict[str, float] = two.results()[0]
    return found


@contextlib.contextmanager
def _meanwhile(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Something in a thread of its own until the block ends; what it raises is raised here."""
    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work, done)
        try:
            yield
        finally:
            done.set()
        working.result()


def _doctors(done: threading.Event) -> None:
    """One doctor after the other. Their parent is this process, which is not pinned."""
    while not done.is_set():
        ended = subprocess.run(DOCTOR, capture_output=True, text=True, timeout=TIMEOUT)
        if not ended.stdout:
            raise BenchError(
                f"fserver doctor ended with status {ended.returncode}: {ended.stderr.strip()}"
            )
