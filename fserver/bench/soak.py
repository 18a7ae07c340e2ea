"""`fserver bench soak`: checks that memory, descriptors and threads do not grow."""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from . import report
from .crew import Case, Crew, Nodes, pair
from .options import choose_cores, parser, size

CHECKS = 12  # before the first count
PARTS = 10  # the counts are read after each, so that the results show when they grew
COUNTS = {
    "resident_bytes": "resident bytes",
    "descriptors": "descriptors",
    "goroutines": "goroutines",
    "threads": "threads",
}
IN_USE = {  # counted at both ends only, since that touches pages
    "engine_bytes": "engine's heap",
    "go_bytes": "with Go's own",
    "malloc_bytes": "malloc",
    "python_blocks": "Python's blocks",
    "gpu_bytes": "GPU",
}
EXACT = ("engine_bytes", "descriptors", "goroutines")  # may not grow, whatever the limit


Looks = list[list[dict[str, int]]]  # one after the other, of worker and server


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns 1 if there is a limit and memory grew by more, or what is EXACT
    grew."""
    options = _parser().parse_args(argv)
    cores = choose_cores(options.cores)
    facts = report.begin(options, cores)
    with (
        pair(nodes, options.transport, cores, device=options.device, exact=True) as two,
        report.Progress(2 * PARTS, "soak", "part") as bar,
    ):
        two.all(
            "prepare", Case("push_pull", (options.size,), (options.size,), device=options.device)
        )
        two.all("verify", 0)
        count, warmup = _counts(options, two)
        timeout = 60 + count / 100
        two.all("run", warmup, timeout=timeout)
        two.all("freeze")
        for part in range(CHECKS):  # what looks warms up too: 11 looks took up to 24 KiB
            two.all("verify", part)
            two.all("in_use")
            two.all("counts")
        start = time.monotonic()
        looks = _watch(two, bar, lambda each: two.all("run", each, timeout=timeout), count)
        seconds = time.monotonic() - start
        idle = _watch(two, bar, lambda _: time.sleep(seconds / PARTS))
        links = two.workers("links")[0]
    print(
        f"{count} push_pulls of {report.show_size(options.size)} each way over "
        f"{' and '.join(links) or options.transport} in {seconds:.1f} s, after {warmup} to warm up"
    )
    titles = "after warm-up", "half way", "at the end", "growth", "while idle"
    print(f"{'':<24}" + "".join(f"{title:>15}" for title in titles))
    rows = []
    for number, role in enumerate(("worker", "server")):
        row: dict[str, Any] = {"role": role, "links": links}
        for names, now, still in zip((COUNTS, IN_USE), looks, idle, strict=True):
            for key, title in names.items():
                if key not in now[0][number]:
                    continue
                values = [look[number][key] for look in now]
                half = values[PARTS // 2] if len(values) > PARTS else ""
                growth = values[-1] - values[0]
                without = still[-1][number][key] - still[0][number][key]
                cells = values[0], half, values[-1], growth, without
                print(f"{role:<8}{title:<16}" + "".join(f"{cell:>15}" for cell in cells))
                row[key] = values
                row[f"growth_{key.removeprefix('resident_')}"] = growth
                row[f"idle_{key.removeprefix('resident_')}"] = without
        rows.append(row)
    report.finish(options, "soak", facts, rows, count=count, bytes_each_way=options.size)
    if options.limit is None:
        return 0
    failed = False
    for key, title in {**COUNTS, **IN_USE}.items():
        worst = max(row.get(f"growth_{key.removeprefix('resident_')}", 0) for row in rows)
        limit = 0 if key in EXACT else options.limit
        if worst > limit:
            print(f"bench: {title} grew by {worst}, but the limit is {limit}", file=sys.stderr)
            failed = True
    return int(failed)


def _watch(
    two: Crew, bar: report.Progress, work: Callable[[int], object], count: int = 0
) -> tuple[Looks, Looks]:
    """Work in parts, of count in all, with a look after each: what is counted, what is in use."""
    in_use = [two.all("in_use")]
    counts = [two.all("counts")]
    for part in range(PARTS):
        work(count * (part + 1) // PARTS - count * part // PARTS)
        two.all("verify", part + 1)
        counts.append(two.all("counts"))
        bar.step()
    in_use.append(two.all("in_use"))
    return counts, in_use


def _counts(options: argparse.Namespace, two: Crew) -> tuple[int, int]:
    """How many push_pulls, and how many before them: of --seconds two fifths are for those, one for
    these, and the rest to be idle for as long."""
    if options.seconds is None:
        return options.count, options.warmup
    trial = two.workers("measure", 10, 200)[0]["p50_us"]
    count = max(int(options.seconds * 1e6 / trial), PARTS)
    return count * 2 // 5, count // 5


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "soak",
        "Measures memory, descriptors, goroutines and threads of a worker and a server over "
        "many push_pulls. There are four figures of memory. The first is the engine's heap: "
        "what the engine has allocated and still uses. The second adds the memory that Go's "
        "runtime has for its threads and for waiting goroutines. The third is what malloc and "
        "Python have in use; a part of it is for the threads that Go starts. The fourth is "
        "resident memory, which also grows when pages are touched for the first time. Reading "
        "the figures takes memory too, so the last column shows the growth in the same time and "
        "with as many readings, but without push_pulls. The number in every answer is checked. "
        "After each tenth of the push_pulls, all bytes of an exchange are compared.",
        seconds=(None, "approximate length of the whole run, instead of --count and --warmup"),
    )
    add = made.add_argument
    add("--count", type=int, default=200_000, help="number of push_pulls (default 200000)")
    add("--warmup", type=int, default=50_000, help="push_pulls before it measures (default 50000)")
    add("--size", type=size, default=4096, help="bytes in each direction (default 4K)")
    add(
        "--device",
        choices=("cpu", "gpu"),
        default="cpu",
        help="where the tensors are. gpu: the worker's on the first GPU, the server's on the last "
        "(default cpu)",
    )
    made.add_argument(
        "--limit",
        type=int,
        metavar="BYTES",
        help="exit with status 1 if other memory grows by more than this, or if the engine's heap "
        "or the number of descriptors or goroutines grows at all",
    )
    return made
