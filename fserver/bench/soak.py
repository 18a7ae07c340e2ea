"""`fserver bench soak`: does memory grow?"""

import argparse
import sys
import time

from . import report
from .pair import Case, Nodes, add_pair_options, choose_cores, pair

PARTS = 10  # memory is read after each, so that the results show when it grew


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns 1 if memory grew by more than --limit."""
    options = _parser().parse_args(argv)
    cores = choose_cores(options.cores)
    facts = report.machine(cores)
    print(report.show_machine(facts), flush=True)
    timeout = 60 + options.count / 100
    with pair(nodes, options.transport, cores) as two:
        two.both("prepare", Case("push_pull", 0, options.size, options.size), timeout=timeout)
        two.both("verify", 1, timeout=timeout)
        two.both("run", options.warmup, timeout=timeout)
        resident = [two.both("memory", timeout=timeout)]
        start = time.monotonic()
        for part in range(PARTS):
            count = options.count * (part + 1) // PARTS - options.count * part // PARTS
            two.both("run", count, timeout=timeout)
            resident.append(two.both("memory", timeout=timeout))
        seconds = time.monotonic() - start
        two.both("verify", 2, timeout=timeout)
    print(
        f"{options.count} push_pulls of {report.show_size(options.size)} each way "
        f"in {seconds:.1f} s, after {options.warmup} to warm up"
    )
    titles = "after warm-up", "half way", "at the end", "growth"
    print("resident bytes  " + "".join(f"{title:>15}" for title in titles))
    rows = []
    for role, sizes in zip(("worker", "server"), zip(*resident, strict=True), strict=True):
        growth = sizes[-1] - sizes[0]
        print(f"{role:<16}{sizes[0]:>15}{sizes[PARTS // 2]:>15}{sizes[-1]:>15}{growth:>15}")
        rows.append({"role": role, "resident_bytes": sizes, "growth_bytes": growth})
    if options.json:
        report.write_json(
            options.json, facts, rows=rows, count=options.count, bytes_each_way=options.size
        )
    worst = max(row["growth_bytes"] for row in rows)
    if options.limit is not None and worst > options.limit:
        print(f"bench: memory grew by {worst} bytes, more than {options.limit}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fserver bench soak",
        description="Resident memory of worker and server before and after many push_pulls.",
    )
    parser.add_argument("--count", type=int, default=200_000, help="push_pulls (default 200000)")
    parser.add_argument("--warmup", type=int, default=50_000, help="before (default 50000)")
    parser.add_argument(
        "--size", type=report.parse_size, default=4096, help="bytes each way (default 4K)"
    )
    parser.add_argument("--limit", type=int, metavar="BYTES", help="fail if either grows by more")
    add_pair_options(parser)
    return parser
