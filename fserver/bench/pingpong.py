"""`fserver bench pingpong`: round trips through the Python API, beside raw TCP in C."""

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from . import report
from .baseline import Baseline
from .pair import Case, Nodes, Pair, add_pair_options, choose_cores, pair

SIZES = "64,4K,64K,1M,16M,64M"
OPS = ("push", "pull", "push_pull")
SMALL = 64  # bytes that a pull sends, and that the baseline sends for an answer without data
ROUND_TIMEOUT = 600.0


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    options = _parser().parse_args(argv)
    cores = choose_cores(options.cores)
    facts = report.machine(cores)
    print(report.show_machine(facts))
    print(report.header(), flush=True)
    rows = []
    for result in run(options, cores, nodes):
        print(report.line(result), flush=True)
        rows.append(result)
    if options.json:
        report.write_json(options.json, facts, rows=rows)
    return 0


def run(
    options: argparse.Namespace, cores: tuple[int, int] | None, nodes: Nodes
) -> Iterator[dict[str, Any]]:
    """Measures every case and gives its row when it is done."""
    with contextlib.ExitStack() as stack:
        raw = None if options.no_baseline else stack.enter_context(Baseline(cores))
        two = stack.enter_context(pair(nodes, options.transport, cores))
        for case in cases(options.sizes, options.ops):
            yield _measure(two, raw, case, options)


def cases(sizes: list[int], ops: list[str]) -> list[Case]:
    """Every size with every op, each under a key of its own."""
    shapes = [(op, size) for size in sizes for op in ops]
    return [
        Case(op, key, SMALL if op == "pull" else size, 0 if op == "push" else size)
        for key, (op, size) in enumerate(shapes)
    ]


def _measure(
    two: Pair, raw: Baseline | None, case: Case, options: argparse.Namespace
) -> dict[str, Any]:
    two.both("prepare", case, timeout=ROUND_TIMEOUT)
    two.both("verify", 0, timeout=ROUND_TIMEOUT)
    count = options.iters
    if count is None:
        trial, _ = two.both("measure", 3, 10, timeout=ROUND_TIMEOUT)
        count = min(max(int(options.seconds * 1e6 / trial["p50_us"]), 10), 100_000)
    warmup = min(max(count // 10, 2), 500)
    measured, baseline = [], []
    for turn in range(options.rounds):
        if raw:
            baseline.append(raw.measure(case.out, case.back or SMALL, warmup, count, ROUND_TIMEOUT))
        figures, _ = two.both("measure", warmup, count, timeout=ROUND_TIMEOUT)
        measured.append(figures)
        two.both("verify", turn + 1, timeout=ROUND_TIMEOUT)
    return report.row(options.transport, case.op, case.out, case.back, count, measured, baseline)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fserver bench pingpong",
        description="Times push_pull and wait between a worker and a server, two processes on a "
        "core each, and in turn with them raw TCP between two spinning processes in C on the "
        "same cores (the columns raw). Figures are medians over the rounds; GB/s counts the "
        "bytes of both directions; the ratio is p50 over raw p50. All data is checked.",
    )
    parser.add_argument(
        "--sizes", type=_sizes, default=SIZES, metavar="LIST", help=f"bytes (default {SIZES})"
    )
    parser.add_argument(
        "--ops", type=_ops, default=",".join(OPS), metavar="LIST", help=f"of {', '.join(OPS)}"
    )
    parser.add_argument("--rounds", type=_positive, default=7, help="rounds (default 7)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--iters", type=_positive, help="exchanges in a round")
    length.add_argument(
        "--seconds", type=float, default=0.2, help="or about so long a round (default 0.2)"
    )
    parser.add_argument("--no-baseline", action="store_true", help="without raw TCP")
    add_pair_options(parser)
    return parser


def _sizes(text: str) -> list[int]:
    try:
        sizes = [report.parse_size(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if min(sizes) < 8:
        raise argparse.ArgumentTypeError(f"{text!r}: want 8 bytes or more")
    return sizes


def _ops(text: str) -> list[str]:
    ops = text.split(",")
    for op in ops:
        if op not in OPS:
            raise argparse.ArgumentTypeError(f"{op!r}: want one of {', '.join(OPS)}")
    return ops


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: want a whole number, 1 or more")
    return int(text)
