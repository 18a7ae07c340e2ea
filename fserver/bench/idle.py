"""`fserver bench idle`: the CPU time of calls that wait."""

import argparse
import sys

from . import report
from .crew import Case, Nodes, pair
from .options import choose_cores, parser


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns 1 if a call used more than --limit."""
    options = _parser().parse_args(argv)
    cores = choose_cores(options.cores)
    facts = report.begin(options, cores)
    timeout = 120 + options.seconds
    with pair(nodes, options.transport, cores) as two:
        two.all("prepare", Case("push_pull", (4096,), (4096,)))
        two.all("verify", 1)
        idle, get_batch = two.all("blocked_get_batch", options.seconds, timeout=timeout)
        waiting, busy = two.all("blocked_wait", options.seconds, timeout=timeout)
    rows = [
        {"role": "server", "state": "blocked in get_batch", "cpu_percent": get_batch},
        {"role": "worker", "state": "blocked in wait", "cpu_percent": waiting},
        {"role": "worker", "state": "no call", "cpu_percent": idle},
        {"role": "server", "state": "no call, a request open", "cpu_percent": busy},
    ]
    print(f"CPU time over {options.seconds:g} s, in percent of one core")
    for row in rows:
        print(f"{row['role']:<8}{row['state']:<26}{row['cpu_percent']:>8.2f} %")
    report.finish(options, "idle", facts, rows, seconds=options.seconds)
    worst = max(row["cpu_percent"] for row in rows)
    if options.limit is not None and worst > options.limit:
        print(
            f"bench: a state used {worst:.2f} % of a core, more than --limit {options.limit:g} %",
            file=sys.stderr,
        )
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "idle",
        "Measures the CPU time that all threads of a worker and a server use while they wait.",
        seconds=(5.0, "length of each state"),
    )
    made.add_argument(
        "--limit",
        type=float,
        metavar="PERCENT",
        help="exit with status 1 if a state uses more than this share of a core",
    )
    return made
