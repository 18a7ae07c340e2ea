"""`fserver bench idle`: what waiting costs."""

import argparse
import sys

from . import report
from .pair import Case, Nodes, add_pair_options, choose_cores, pair


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns 1 if a call used more than --limit."""
    options = _parser().parse_args(argv)
    cores = choose_cores(options.cores)
    facts = report.machine(cores)
    print(report.show_machine(facts), flush=True)
    timeout = 120 + options.seconds
    with pair(nodes, options.transport, cores) as two:
        two.both("prepare", Case("push_pull", 0, 4096, 4096), timeout=timeout)
        two.both("verify", 1, timeout=timeout)
        idle, get_batch = two.both("blocked_get_batch", options.seconds, timeout=timeout)
        waiting, busy = two.both("blocked_wait", options.seconds, timeout=timeout)
    rows = [
        {"role": "server", "state": "blocked in get_batch", "cpu_percent": get_batch},
        {"role": "worker", "state": "blocked in wait", "cpu_percent": waiting},
        {"role": "worker", "state": "no call", "cpu_percent": idle},
        {"role": "server", "state": "no call, a request open", "cpu_percent": busy},
    ]
    print(f"CPU time over {options.seconds:g} s, percent of one core")
    for row in rows:
        print(f"{row['role']:<8}{row['state']:<26}{row['cpu_percent']:>8.2f} %")
    if options.json:
        report.write_json(options.json, facts, rows=rows, seconds=options.seconds)
    worst = max(row["cpu_percent"] for row in rows)
    if options.limit is not None and worst > options.limit:
        print(f"bench: {worst:.2f} % is more than {options.limit:g} %", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fserver bench idle",
        description="CPU time of worker and server, all threads, while they wait.",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="how long (default 5)")
    parser.add_argument("--limit", type=float, metavar="PERCENT", help="fail if one uses more")
    add_pair_options(parser)
    return parser
