"""`fserver bench pingpong`: round trips through the Python API, beside the same copy in C."""

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from . import report
from .baseline import Baseline, baseline_of
from .crew import Case, Crew, Nodes, pair
from .options import MakeBaseline, choose_cores, one_of, open_baseline, parser, sizes
from .turns import CrewPlayer, take_turns

SIZES = "64,4K,64K,1M,16M,64M"
OPS = ("push", "pull", "push_pull")
SMALL = 64  # bytes that a pull sends, and that the baseline sends for an answer without data


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    options = _parser().parse_args(argv)
    cores = choose_cores(options.cores)
    facts = report.begin(options, cores)
    table, rows = report.Table(), []
    print(table.header(), flush=True)
    planned = cases(options.sizes, options.ops, options.device)
    with report.Progress(len(planned) * options.rounds, "pingpong") as bar:
        for row in run(options, planned, cores, nodes, bar):
            bar.print(table.line(row))
            rows.append(row)
    report.finish(options, "pingpong", facts, rows)
    return 0


def run(
    options: argparse.Namespace,
    planned: list[Case],
    cores: tuple[int, int] | None,
    nodes: Nodes,
    bar: report.Progress,
    host: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Measures the cases between two processes of this host, and gives each row when it is done.
    `host`: the address of this host that they use."""
    with pair(nodes, options.transport, cores, host, device=planned[0].device) as crew:
        yield from measure(crew, options, planned, cores, bar, host)


def measure(
    crew: Crew,
    options: argparse.Namespace,
    planned: list[Case],
    cores: tuple[int, int] | None,
    bar: report.Progress,
    host: str | None = None,
    make: MakeBaseline = Baseline,
) -> Iterator[dict[str, Any]]:
    """The same with a pair that is there, in turn with the baseline of what connects it, which
    `make` starts."""
    with contextlib.ExitStack() as stack:
        player = CrewPlayer(crew)
        if planned[0].device == "gpu":  # how that travels is known when it has
            player.prepare(planned[0])
            player.check(0)
        transport = "+".join(crew.workers("links")[0])
        way = baseline_of(transport)
        where = "{},{}".format(*crew.gpus) if way == "raw gpu" else host
        raw, says = open_baseline(stack, options, way, cores, where, make)
        for case in planned:
            out, back = sum(case.out), sum(case.back)
            player.prepare(case)
            if raw:
                raw.prepare(out, back or SMALL)
            players = [raw, player] if raw else [player]
            *baseline, measured = take_turns(
                players, options.rounds, options.seconds, options.iters, done=bar.step
            )
            yield report.row(
                transport, case.op, out, back, measured, baseline[0] if raw else [], **says
            )


def cases(sizes: list[int], ops: list[str], device: str = "cpu") -> list[Case]:
    """Every size with every op, each under a key of its own."""
    shapes = [(op, size) for size in sizes for op in ops]
    return [
        Case(
            op,
            (SMALL if op == "pull" else size,),
            () if op == "push" else (size,),
            key,
            device=device,
        )
        for key, (op, size) in enumerate(shapes)
    ]


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "pingpong",
        "Times push_pull and wait between a worker and a server, two processes on a core each, "
        "and in turn with them the same bytes between two spinning processes in C on the same "
        "cores: raw TCP, for cma process_vm_writev and a flag in shared memory, for cudaipc the "
        "copy engine and a flag in host memory (the columns raw). Figures are medians over the "
        "rounds; GB/s counts the bytes of both directions; the ratio is p50 over raw p50. Every "
        "answer's number is checked, and between rounds all bytes of an exchange into poisoned "
        "memory. With tensors on GPUs the numbers of push and pull are checked between rounds "
        "alone.",
        seconds=(0.2, "about so long a round of each"),
        rounds=7,
    )
    made.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        default="cpu",
        help="where tensors are; gpu: the worker's on the first, the server's on the last (with "
        "--transport auto the copy engine moves them)",
    )
    made.add_argument(
        "--sizes", type=sizes, default=SIZES, metavar="LIST", help=f"bytes (default {SIZES})"
    )
    made.add_argument(
        "--ops",
        type=one_of(OPS),
        default=",".join(OPS),
        metavar="LIST",
        help=f"of {', '.join(OPS)}",
    )
    return made
