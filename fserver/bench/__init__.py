"""`fserver bench`: measures fserver on this host. See --help of each benchmark.

What is compared takes turns (turns.py). The processes of fserver are a crew (crew.py) of parts
(peers.py), and so are those of others' ways (beside.py, ways.py); the raw baselines are programs in
C (baseline.py). `graph` has processes of its own (sides.py).
"""

import argparse
import importlib
import sys

from .errors import BenchError

BENCHMARKS = {
    "pingpong": "round trips between two pinned processes, beside the same copy in C",
    "ipc": "all ways inside a host side by side: tcp, cma, and what is raw",
    "matrix": "local, remote and joint; push, pull and push_pull; cpu and gpu",
    "af": "the layers of a large model: round trip, its stages, tokens per second",
    "graph": "channels in CUDA graphs: the shape of a model, round trips, GEMMs beside them",
    "fanin": "one server and 1 to 40 worker groups, or idle groups beside a busy one",
    "threads": "two Python threads of a worker beside one; one beside links() or doctor",
    "verify": "random shapes, types and counts, compared byte by byte; some timed too",
    "soak": "resident memory over many push_pulls",
    "idle": "CPU time of calls that have nothing to do",
}


def main(argv: list[str]) -> int:
    """Runs one benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="fserver bench",
        description="Measures fserver on this host.",
        epilog="\n".join(f"{name:<10}{text}" for name, text in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", choices=BENCHMARKS, help="what to measure")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its options")
    options = parser.parse_args(argv)
    try:
        return importlib.import_module(f".{options.benchmark}", __name__).main(options.args)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
