"""`fserver bench`: measures fserver on this host. See --help of each benchmark.

A Run (run.py) has the table, and ways that take turns; raw ones are programs in C (baseline.py).
Processes are a crew (crew.py) of actors; of graphs and other libraries, a team (team.py).
"""

import argparse
import importlib
import os
import sys
from unittest import mock

from .errors import BenchError

BENCHMARKS = {
    "pingpong": "round trips between two pinned processes, compared with the same copies in C",
    "kv": "keys and values through the C++ headers of ps-lite: goodput of pushes and pulls",
    "af": "the layers of a large model: round trip, where its time goes, tokens per second",
    "graph": "stream channels in CUDA graphs: layers of a model, round trips, effect on GEMMs",
    "compare": "pingpong or af with several settings or by two builds, in turn",
}

# af is pingpong with the tensors, layers and stages of a large model.
MODEL = "--layers 61 --stages 3 --tensors 7 --sizes 128K:256K --ops push_pull".split()
PRESETS = {"af": ("pingpong", [*MODEL, *"--rounds 5 --seconds 1".split()])}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="fserver bench",
        description="Measures fserver on this host. `fserver bench BENCHMARK --help` says more.",
        epilog="\n".join(f"{name:<10}{text}" for name, text in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", choices=BENCHMARKS, help="one of the benchmarks below")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the options of the benchmark")
    options = parser.parse_args(argv)
    # A row of a table says the transport; a line of each connection would hide the table.
    asked = {"FSERVER_LOG", "PS_VERBOSE"} & set(os.environ)
    try:
        with mock.patch.dict(os.environ, {} if asked else {"FSERVER_LOG": "warn"}):
            name, usual = PRESETS.get(options.benchmark, (options.benchmark, []))
            return int(importlib.import_module(f".{name}", __name__).main([*usual, *options.args]))
    except (BenchError, ModuleNotFoundError) as error:
        more = "" if isinstance(error, BenchError) else " (run pip install psutil rich)"
        print(f"bench: {error}{more}", file=sys.stderr)
        return 1
