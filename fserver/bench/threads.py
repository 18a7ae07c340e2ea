"""`fserver bench threads`: threads of one worker, each with a micro-batch of its own."""

import argparse
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from . import report
from .crew import Case, Crew, Nodes, pair
from .options import parser, positive, size
from .peers import WorkerPart, figures

COLUMNS = (
    report.TRANSPORT,
    report.Column("threads", 7, "threads", str),
    report.Column("µs/exchange", 11, "per_exchange_us", "{:.2f}".format),
    report.Column("p50", 8, "p50_us", "{:.2f}".format),
    report.Column("p99", 8, "p99_us", "{:.1f}".format),
)


class ThreadsPart(WorkerPart):
    """A worker whose stages belong to a thread each."""

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
    facts = report.begin(options, None)
    case = Case("push_pull", (options.size,), (options.size,), stages=2, unit=2)
    rounds: list[tuple[dict[str, float], dict[str, float]]] = []
    with (
        pair(nodes, options.transport, None, worker="threads.ThreadsPart") as two,
        report.Progress(options.rounds, "threads") as bar,
    ):
        two.all("prepare", case)
        two.all("verify", 0)
        transport = "+".join(two.workers("links")[0])
        trial = _together(two, 1, 200)["per_exchange_us"]
        count = options.iters or max(100, int(options.seconds * 1e6 / trial))
        for _ in range(options.rounds):
            rounds.append((_together(two, 1, count), _together(two, 2, count)))
            bar.step()
        two.all("verify", 1)
    table = report.Table(COLUMNS)
    print(table.header())
    rows = []
    for threads, found in zip((1, 2), zip(*rounds, strict=True), strict=True):
        row = {key: statistics.median(each[key] for each in found) for key in found[0]}
        rows.append({"transport": transport, "threads": threads, "iters": count, **row})
        print(table.line(rows[-1]))
    ratio = statistics.median(b["per_exchange_us"] / a["per_exchange_us"] for a, b in rounds)
    print(f"\nan exchange of two threads takes {ratio:.2f} x the time of one's")
    report.finish(options, "threads", facts, rows, two_of_one=round(ratio, 3))
    return 0


def _together(two: Crew, threads: int, count: int) -> dict[str, float]:
    """The worker's figures, while the server answers as many requests."""
    worker, server = two.peers
    server.tell("run", threads * count)
    worker.tell("together", threads, count)
    return two.results()[0]


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "threads",
        "Two Python threads of one worker, each in a loop of push_pull and wait with tensors and "
        "keys of its own, beside one: the time for an exchange, of all that were made. Below 1 x "
        "they overlap; what is above is what they cost each other. Nothing is pinned: "
        "taskset -c chooses cores.",
        seconds=(0.2, "of each round"),
        plot=False,
    )
    made.add_argument("--rounds", type=positive, default=5, help="rounds (default 5)")
    made.add_argument("--iters", type=positive, help="exchanges of a thread, not --seconds")
    made.add_argument("--size", type=size, default=4096, help="bytes each way (default 4K)")
    return made
