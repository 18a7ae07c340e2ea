"""`fserver bench soak`: does anything grow?"""

import argparse
import sys
import time

from . import report
from .crew import Case, Crew, Nodes, pair
from .options import choose_cores, parser, size

CHECKS = 12  # before the first count
PARTS = 10  # the counts are read after each, so that the results show when they grew
COUNTS = {
    "resident_bytes": "resident bytes",
    "descriptors": "descriptors",
    "goroutines": "goroutines",
}
IN_USE = {  # counted at both ends only, since that touches pages
    "engine_bytes": "engine's heap",
    "malloc_bytes": "malloc",
    "python_blocks": "Python's blocks",
    "gpu_bytes": "GPU",
}


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns 1 if memory grew by more than --limit, or anything else grew
    while there is a limit."""
    options = _parser().parse_args(argv)
    cores = choose_cores(options.cores)
    facts = report.begin(options, cores)
    with (
        pair(nodes, options.transport, cores, device=options.device) as two,
        report.Progress(PARTS, "soak", "part") as bar,
    ):
        two.all(
            "prepare", Case("push_pull", (options.size,), (options.size,), device=options.device)
        )
        two.all("verify", 0)
        count, warmup = _counts(options, two)
        timeout = 60 + count / 100
        two.all("run", warmup, timeout=timeout)
        for part in range(CHECKS):  # what looks warms up too: 11 looks took up to 24 KiB
            two.all("verify", part)
            two.all("in_use")
            two.all("counts")
        in_use = [two.all("in_use")]
        counts = [two.all("counts")]
        start = time.monotonic()
        for part in range(PARTS):
            two.all("run", count * (part + 1) // PARTS - count * part // PARTS, timeout=timeout)
            two.all("verify", part + 1)
            counts.append(two.all("counts"))
            bar.step()
        in_use.append(two.all("in_use"))
        seconds = time.monotonic() - start
        links = two.workers("links")[0]
    print(
        f"{count} push_pulls of {report.show_size(options.size)} each way over "
        f"{' and '.join(links) or options.transport} in {seconds:.1f} s, after {warmup} to warm up"
    )
    titles = "after warm-up", "half way", "at the end", "growth"
    print(f"{'':<24}" + "".join(f"{title:>15}" for title in titles))
    rows = []
    for number, role in enumerate(("worker", "server")):
        row: dict[str, object] = {"role": role, "links": links}
        for names, looks in ((COUNTS, counts), (IN_USE, in_use)):
            for key, title in names.items():
                if key not in looks[0][number]:
                    continue
                now = [look[number][key] for look in looks]
                half = now[PARTS // 2] if len(now) > PARTS else ""
                growth = now[-1] - now[0]
                print(f"{role:<8}{title:<16}{now[0]:>15}{half:>15}{now[-1]:>15}{growth:>15}")
                row[key] = now
                row[f"growth_{key.removeprefix('resident_')}"] = growth
        rows.append(row)
    report.finish(options, "soak", facts, rows, count=count, bytes_each_way=options.size)
    if options.limit is None:
        return 0
    failed = False
    for key, title in {**COUNTS, **IN_USE}.items():
        worst = max(row.get(f"growth_{key.removeprefix('resident_')}", 0) for row in rows)
        limit = 0 if key in ("descriptors", "goroutines") else options.limit
        if worst > limit:
            print(f"bench: {title} grew by {worst}, more than {limit}", file=sys.stderr)
            failed = True
    return int(failed)


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
        "Memory, descriptors and goroutines of worker and server over many push_pulls. Memory is "
        "what the engine's heap, malloc and Python have in use, and what is resident, to which "
        "pages belong that are touched for the first time. Of each push_pull the answer's number "
        "is checked, and all bytes of one after each tenth. Tensors on GPUs are the worker's "
        "on the first and the server's on the last.",
        seconds=(None, "about so long in all, instead of --count and --warmup"),
    )
    made.add_argument("--count", type=int, default=200_000, help="push_pulls (default 200000)")
    made.add_argument("--warmup", type=int, default=50_000, help="before (default 50000)")
    made.add_argument("--size", type=size, default=4096, help="bytes each way (default 4K)")
    made.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where tensors are")
    made.add_argument(
        "--limit",
        type=int,
        metavar="BYTES",
        help="fail if either's memory grows by more, or a descriptor or goroutine is left",
    )
    return made
