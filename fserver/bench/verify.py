"""`fserver bench verify`: compares the received data with the sent data."""

import argparse
import bisect
import contextlib
import dataclasses
import secrets
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from . import report
from .baseline import MAX_BYTES, Baseline, baseline_of
from .crew import Crew, Member, Nodes, start
from .errors import WrongDataError
from .options import add_no_baseline, choose_cores, open_baseline, parser, positive, size
from .pingpong import SMALL

CHUNK = 20  # steps between two looks at the clock
TIMED = 5  # of them that are then timed too
BINS = (4 << 10, 64 << 10, 1 << 20, 16 << 20)  # rounds of up to so many bytes; others

COLUMNS = (
    report.TRANSPORT,
    report.Column("bytes to", 8, "bytes_up_to", report.show_size),
    report.Column("rounds", 6, "rounds", str),
    report.Column("first µs", 11, "first_p50_us", "{:.1f}".format),
    report.Column("again µs", 11, "p50_us", "{:.1f}".format),
    report.Column("raw µs", 11, "baseline_p50_us", "{:.1f}".format),
    report.RATIO,
)


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns 1 at the first difference."""
    options = _parser().parse_args(argv)
    cores = choose_cores(options.cores)
    facts = report.begin(options, cores)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    checked = {
        "transport": options.transport,
        "seed": seed,
        "workers": options.workers,
        "servers": options.servers,
        "steps": 0,
        "requests": 0,
        "tensors": 0,
        "bytes": 0,
        "difference": None,
    }
    timed: list[dict[str, Any]] = []
    says: dict[str, Any] = {}
    try:
        _play(options, cores, nodes, checked, timed, says)
    except WrongDataError as error:
        print(f"bench: {error}", file=sys.stderr)
        checked["difference"] = str(error)
        options.plot = None  # of times that nobody needs
    rows = list(_rows(checked["transport"], timed, **says))
    report.finish(options, "verify", facts, rows, checked=checked)
    if checked["difference"]:
        return 1
    table = report.Table(COLUMNS)
    print(table.header())
    for row in rows:
        print(table.line(row))
    print(
        "{requests} requests of {workers} workers to {servers} servers over {transport}, "
        "{tensors} tensors, {bytes} bytes: no difference".format(**checked)
    )
    return 0


def _play(
    options: argparse.Namespace,
    cores: tuple[int, int] | None,
    nodes: Nodes,
    checked: dict[str, Any],
    timed: list[dict[str, Any]],
    says: dict[str, Any],
) -> None:
    """Fills in what was checked, each round that was timed, and which baseline it was beside."""
    worker_core, server_core = cores or (None, None)
    members = [
        Member("workers", "randoms.RandomWorkers", "worker", worker_core, options.workers),
        Member("servers", "randoms.RandomServers", "server", server_core, options.servers),
    ]
    with (
        contextlib.ExitStack() as stack,
        start(members, nodes) as crew,
        crew.cluster(options.transport),
        report.Progress(options.steps or options.seconds, "verify", "") as bar,
    ):
        checked["transport"] = "+".join(crew.workers("links")[0])
        raw, how = open_baseline(stack, options, baseline_of(checked["transport"]), cores)
        says.update(how)
        seconds = 0.0
        while True:
            first = checked["steps"]
            count = min(CHUNK, options.steps - first) if options.steps else CHUNK
            start_time = time.monotonic()
            (moved,) = crew.workers("play", checked["seed"], first, count, options.max_bytes)
            took = time.monotonic() - start_time
            checked["steps"] += count
            for name, value in moved.items():
                checked[name] += value
            for step in range(first, first + min(count, TIMED)):
                timed.extend(_time(crew, raw, checked["seed"], step, options.max_bytes))
            seconds += took
            bar.step(count if options.steps else took)
            if options.steps:
                over = checked["steps"] == options.steps
            else:
                over = seconds >= options.seconds
            if over:
                return


def _time(
    crew: Crew, raw: Baseline | None, seed: int, step: int, limit: int
) -> Iterator[dict[str, Any]]:
    """The rounds of a step, and of each the same bytes in one raw round trip: both twice, of which
    the second counts."""
    crew.all("ready", seed, step, limit)
    for found in crew.workers("timed")[0]:
        raw_us = None
        if raw and max(found.bytes_out, found.bytes_back) <= MAX_BYTES:
            raw.prepare(found.bytes_out or SMALL, found.bytes_back or SMALL)
            raw_us = raw.measure(1, 1)["p50_us"]
        yield {**dataclasses.asdict(found), "baseline_us": raw_us}


def _rows(
    transport: str,
    timed: list[dict[str, Any]],
    way: str | None = None,
    missing: str | None = None,
) -> Iterator[dict[str, Any]]:
    """A row for each bin of sizes, with medians over its rounds; the ratio is that of theirs."""
    bins: dict[int, list[dict[str, Any]]] = {}
    for one in timed:
        bins.setdefault(bisect.bisect_left(BINS, one["bytes_out"] + one["bytes_back"]), []).append(
            one
        )
    for number, some in sorted(bins.items()):
        with_raw = [one for one in some if one["baseline_us"]]
        yield {
            "transport": transport,
            "bytes_up_to": [*BINS, None][number],
            "rounds": len(some),
            "first_p50_us": _median(one["first_us"] for one in some),
            "p50_us": _median(one["again_us"] for one in some),
            "baseline_p50_us": _median(one["baseline_us"] for one in with_raw),
            "ratio": _median(one["again_us"] / one["baseline_us"] for one in with_raw),
            "baseline": way if with_raw else None,
            "baseline_missing": None if with_raw else missing,
            "timed": some,
        }


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return round(statistics.median(found), 3) if found else None


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "verify",
        "Sends tensors of random dtypes, shapes (0 to 10 dimensions, also without rows), sizes "
        "and counts between several workers and servers, with up to three requests of each "
        "worker in flight. Compares keys, dtypes, shapes and all bytes at both ends. The memory "
        "for answers holds other values before. There are few keys, so the tensors of a key "
        "grow, shrink and change dtype. The seed determines all choices. At the first "
        "difference, the benchmark describes it and exits with status 1. The workers are in one "
        "process and the servers in another. A quarter of the steps is repeated and timed, "
        "without comparing, filling or creating tensors. In a round, all workers send one "
        "request at the same time and wait for the answers. Each round is timed twice: after "
        "another round (first), and after itself (again). In turn with them, two processes in C "
        "move as many bytes, also twice (raw). They send all pushes as one block and all "
        "answers as one block, while fserver sends several tensors between several workers and "
        "servers, with one thread on each side. The table has medians over the rounds of a "
        "size. The size counts both directions. The ratio is the median of again / raw.",
        seconds=(10.0, "how long to compare"),
    )
    add_no_baseline(made)
    add = made.add_argument
    add("--seed", type=int, help="the seed, to repeat an earlier run (default: random)")
    add("--steps", type=positive, metavar="N", help="make N steps, instead of --seconds")
    add("--workers", type=positive, default=2, metavar="N", help="worker groups (default 2)")
    add("--servers", type=positive, default=2, metavar="N", help="server groups (default 2)")
    add("--max-bytes", type=size, default="1M", help="largest tensor, in bytes (default 1M)")
    return made
