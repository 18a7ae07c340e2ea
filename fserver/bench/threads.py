"""`fserver bench threads`: threads of one worker, each with a micro-batch of its own."""

import argparse
import contextlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from . import report
from .crew import TIMEOUT, Case, Crew, Nodes, pair
from .errors import BenchError
from .options import parser, positive, size
from .peers import WorkerPart, figures

COLUMNS = (
    report.TRANSPORT,
    report.Column("threads", 7, "threads", str),
    report.Column("µs/exchange", 11, "per_exchange_us", "{:.2f}".format),
    report.Column("p50", 8, "p50_us", "{:.2f}".format),
    report.Column("p99", 8, "p99_us", "{:.1f}".format),
)


BESIDE = {
    "links": "a thread that calls links() every 10 ms",
    "doctor": "`fserver doctor --json`, again and again",
}
SECONDS = {"doctor": 2.0}  # of a round; a doctor takes one or two
DOCTOR = [sys.executable, "-m", "fserver", "doctor", "--json"]


class ThreadsPart(WorkerPart):
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
            return self._alone(self.lanes[stage][0], count, sampled=True)

        with ThreadPoolExecutor(threads) as pool:
            running = [pool.submit(alone, stage) for stage in range(threads)]
            gate.wait()
            start = time.perf_counter_ns()
            samples = [took for each in running for took in each.result()]
            end = time.perf_counter_ns()
        self.sequence = before + threads * count  # as the server has counted them
        found = figures(samples)
        return {
            "per_exchange_us": (end - start) / 1e3 / len(samples),
            "p50_us": found["p50_us"],
            "p99_us": found["p99_us"],
        }


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    options = _parser().parse_args(argv)
    facts = report.begin(options, options.cores)
    case = Case("push_pull", (options.size,), (options.size,), stages=2, unit=2)
    rounds: list[tuple[dict[str, float], dict[str, float]]] = []
    with (
        pair(nodes, options.transport, options.cores, worker="threads.ThreadsPart") as two,
        report.Progress(options.rounds, "threads") as bar,
    ):
        two.all("prepare", case)
        two.all("verify", 0)
        transport = "+".join(two.workers("links")[0])
        trial = _run(two, 200, "together", 1, 200)["per_exchange_us"]
        seconds = options.seconds or SECONDS.get(options.beside, 0.2)
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
            bar.step()
        two.all("verify", 1)
    table = report.Table(COLUMNS)
    print(table.header())
    rows = []
    names = (1, options.beside or 2)
    for threads, found in zip(names, zip(*rounds, strict=True), strict=True):
        row = {key: statistics.median(each[key] for each in found) for key in found[0]}
        rows.append({"transport": transport, "threads": threads, "iters": count, **row})
        print(table.line(rows[-1]))
    ratio = statistics.median(b["per_exchange_us"] / a["per_exchange_us"] for a, b in rounds)
    beside = f"beside {BESIDE[options.beside]}" if options.beside else "of two threads"
    print(f"\nan exchange {beside} takes {ratio:.2f} times as long as one of one thread alone")
    report.finish(options, "threads", facts, rows, ratio=round(ratio, 3))
    return 0


def _run(two: Crew, requests: int, method: str, *args: int) -> dict[str, float]:
    """The figures of a method of the worker, while the server answers so many requests."""
    worker, server = two.peers
    server.tell("run", requests)
    worker.tell(method, *args)
    return two.results()[0]


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


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "threads",
        "Compares two Python threads of one worker with one thread. Each thread calls push_pull "
        "and wait in a loop, with tensors and keys of its own. The benchmark prints the elapsed "
        "time divided by the number of exchanges of all threads. A ratio below 1 means that the "
        "threads overlap, a ratio above 1 that they slow each other. With --beside, there is one "
        "thread, and something else runs in every second round. A doctor is a new Python process "
        "each time and uses a whole core, so it slows the pair if no core is free. Processes are "
        "pinned only with --cores, and a doctor never is. Use taskset -c to give both sides "
        "several cores.",
        seconds=(None, "length of each round (default 0.2, with --beside doctor 2)"),
    )
    made.add_argument(
        "--beside",
        choices=tuple(BESIDE),
        help="; ".join(f"{name}: {what}" for name, what in BESIDE.items()),
    )
    add = made.add_argument
    add("--rounds", type=positive, default=5, help="number of rounds (default 5)")
    add("--iters", type=positive, metavar="N", help="make N exchanges, instead of --seconds")
    add("--size", type=size, default=4096, help="bytes in each direction (default 4K)")
    return made
