"""`fserver bench graph`: measures stream channels in CUDA graphs."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch

from .. import libraries
from ..errors import BenchError
from ..options import ON_STREAMS, above_zero, parser, positive, some_of
from ..report import save
from ..team import Team
from . import overlap, traffic, trips

# Each has `rows`, of which the last ones are most likely to fail, and `summary`, which gives the
# numbers of a row; of several GPUs the worst counts.
WORKS: dict[str, Any] = {"af": traffic, "overlap": overlap, "trips": trips}
MODES = ("kernel", "copy")  # of channels on GPUs
SOME = (*MODES, "host", "none")
BESIDE = (*ON_STREAMS, "none")
PARSER = parser(
    "fserver bench graph",
    "Measures stream channels in CUDA graphs, with the traffic of a disaggregated model, and other "
    "libraries that move the same bytes (rows with `by`; one that does not work here is skipped). "
    "docs/benchmarks.md describes the rows. The status is 1 if a row failed or data was wrong.",
    ("--modes", some_of(*SOME), None, f"of channels, {', '.join(SOME)} (default: all that fit)"),
    ("--beside", some_of(*BESIDE), ",".join(ON_STREAMS), f"beside, some of {', '.join(BESIDE)}"),
    ("--workers", positive, None, "number of workers (default: 2 with 4 or more GPUs, else 1)"),
    ("--servers", positive, None, "number of servers (default: the same as workers)"),
    ("--layers", positive, 61, "number of layers"),
    ("--stages", positive, 3, "number of micro-batches"),
    ("--rows", positive, 128, "rows of a tensor"),
    ("--width", positive, 7168, "width of a tensor, a multiple of 4"),
    ("--replays", positive, 300, "af: number of timed replays for each row"),
    ("--size", positive, 8192, "overlap: size of the GEMM"),
    ("--rounds", positive, 200, "overlap: rounds, with and without traffic, for a row"),
    ("--ms", above_zero, 30.0, "overlap: length of each part"),
    ("--seconds", above_zero, 40.0, "overlap: longest time of a row"),
    ("--runs", positive, 1000, "trips: number of runs of a graph of 20 round trips"),
)
PARSER.add_argument("work", choices=WORKS, help="see docs/benchmarks.md")


def team(shape: tuple[int, int], **how: Any) -> Team:
    """The processes, each with cores of its own where there are enough."""
    # There are fewer GPUs than sides only where MPS lets them share one.
    gpus = [i % torch.cuda.device_count() for i in range(sum(shape))]
    return Team(shape, gpus, os.sched_getaffinity(0), **how)


def play(
    made: Team, function: Callable[..., Any], what: dict[str, Any], limit: float, **how: Any
) -> list[Any]:
    """Runs a function in all processes, with a cluster of nodes unless it is `by` another library;
    `how` is of Crew.cluster. After an error the processes are not used again."""
    cluster = made.cluster(what.pop("transport", "auto"), **how)
    with contextlib.nullcontext() if "by" in what else cluster:
        return made.all("run", function, what, limit=limit)


def _measured(args: argparse.Namespace) -> Generator[list[dict[str, Any]], None, None]:
    """Yields rows, one by one or several that belong together. Processes that have used another
    library are not used for anything else, and what has failed of a library is not tried again."""
    work, gave_up = WORKS[args.work], dict[Any, str]()
    made, used = None, None
    with contextlib.ExitStack() as stack:
        for function, what, limit in work.rows(args):
            row, by = {"work": args.work, **what}, what.get("by")
            kind = by, what.get("how")
            if kind in gave_up:
                yield [{**row, "skipped": gave_up[kind]}]
                continue
            try:
                if not made or not made.peers or by != used:
                    stack.close()
                    shape, used = (args.workers, args.servers), by
                    made = team(shape, variables=libraries.ENVIRONMENT if by else {})
                    stack.enter_context(made)
                results = play(made, function, what, limit)
                wrong = {"wrong": sum(r["wrong"] for r in results)}
                yield [{**row, **one, **wrong} for one in work.summary(results, args)]
            except BenchError as error:  # the other rows are of interest still
                print(f"{by or 'fserver'}: {error}", file=sys.stderr, flush=True)
                if by:
                    gave_up[kind] = error.reason
                yield [{**row, "skipped" if by else "error": error.reason}]


def _parsed(argv: list[str], gpus: int) -> argparse.Namespace:
    args = PARSER.parse_args(argv)
    if args.work == "trips":
        args.workers = args.servers = 1
        args.modes = args.modes or SOME[:-1]
    elif "host" in (args.modes or MODES):
        PARSER.error(f"--modes: 'host': want some of {', '.join(MODES)} with {args.work}")
    args.modes = [mode for mode in args.modes or MODES if mode != "none"]
    args.beside = [way for way in args.beside if way != "none"]
    args.workers = args.workers or (2 if gpus >= 4 else 1)
    args.servers = args.servers or args.workers
    args.sizes = [(args.rows * args.width, 2 * args.rows * args.width)] * args.stages
    want, shared = args.workers + args.servers, "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    if gpus < (1 if shared else want):
        raise BenchError(f"torch sees {gpus} GPUs, want {want} (or CUDA's MPS)")
    return args


def main(argv: list[str]) -> int:
    gpus = torch.cuda.device_count()
    args = _parsed(argv, gpus)
    result = {"bench": "graph", "options": vars(args), "torch": torch.__version__, "gpus": gpus}
    every, failures = list[dict[str, Any]](), 0
    with contextlib.closing(_measured(args)) as found:
        for rows in found:
            failed = any("error" in row or row.get("wrong") for row in rows)
            failures += failed
            for row in rows:
                shown = "  ".join(f"{k}={v}" for k, v in row.items() if k != "sides")
                print(("FAIL " if failed else "") + shown, flush=True)
            every += rows
            if args.json:
                save(args.json, {**result, "rows": every})
            if failures == 2:
                break
    return 1 if failures else 0
