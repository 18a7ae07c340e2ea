"""`fserver bench`: measures fserver on this host. See --help of each benchmark."""

import argparse
import importlib
import sys

from .pair import BenchError

BENCHMARKS = {
    "pingpong": "round trips between two pinned processes, beside a raw baseline in C",
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
