"""`fserver bench soak`: does memory grow?"""

import argparse
import sys
import time

from . import report
from .crew import Case, Crew, Nodes, pair
from .options import choose_cores, parser, size

PARTS = 10  # memory is read after each, so that the results show when it grew


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns 1 if memory grew by more than --limit."""
    options = _parser().parse_args(argv)
    cores = choose_cores(options.cores)
    facts = report.begin(options, cores)
    with (
        pair(nodes, options.transport, cores) as two,
        report.Progress(PARTS, "soak", "part") as bar,
    ):
        two.all("prepare", Case("push_pull", (options.size,), (options.size,)))
        two.all("verify", 1)
        count, warmup = _counts(options, two)
        timeout = 60 + count / 100
        two.all("run", warmup, timeout=timeout)
        resident = [two.all("memory")]
        start = time.monotonic()
        for part in range(PARTS):
            two.all("run", count * (part + 1) // PARTS - count * part // PARTS, timeout=timeout)
            resident.append(two.all("memory"))
            bar.step()
        seconds = time.monotonic() - start
        two.all("verify", 2)
    print(
        f"{count} push_pulls of {report.show_size(options.size)} each way "
        f"in {seconds:.1f} s, after {warmup} to warm up"
    )
    titles = "after warm-up", "half way", "at the end", "growth"
    print("resident bytes  " + "".join(f"{title:>15}" for title in titles))
    rows = []
    for role, sizes in zip(("worker", "server"), zip(*resident, strict=True), strict=True):
        growth = sizes[-1] - sizes[0]
        print(f"{role:<16}{sizes[0]:>15}{sizes[PARTS // 2]:>15}{sizes[-1]:>15}{growth:>15}")
        rows.append({"role": role, "resident_bytes": sizes, "growth_bytes": growth})
    report.finish(options, "soak", facts, rows, count=count, bytes_each_way=options.size)
    worst = max(row["growth_bytes"] for row in rows)
    if options.limit is not None and worst > options.limit:
        print(f"bench: memory grew by {worst} bytes, more than {options.limit}", file=sys.stderr)
        return 1
    return 0


def _counts(options: argparse.Namespace, two: Crew) -> tuple[int, int]:
    """How many push_pulls, and how many before them; a fifth of --seconds is for those."""
    if options.seconds is None:
        return options.count, options.warmup
    trial = two.workers("measure", 10, 200)[0]["p50_us"]
    count = max(int(options.seconds * 1e6 / trial), PARTS)
    return count * 4 // 5, count // 5


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "soak",
        "Resident memory of worker and server before and after many push_pulls, of which each "
        "answer's number is checked, and before and after all bytes of one.",
        seconds=(None, "about so long in all, instead of --count and --warmup"),
    )
    made.add_argument("--count", type=int, default=200_000, help="push_pulls (default 200000)")
    made.add_argument("--warmup", type=int, default=50_000, help="before (default 50000)")
    made.add_argument("--size", type=size, default=4096, help="bytes each way (default 4K)")
    made.add_argument("--limit", type=int, metavar="BYTES", help="fail if either grows by more")
    return made
