"""`fserver bench fanin`: one server and many worker groups."""

import argparse
import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from . import report
from .baseline import baseline_of
from .crew import Case, Member, Nodes, start
from .idlers import IdlersPlayer
from .options import CHECKED, choose_cores, numbers, open_baseline, parser, positive, size
from .turns import CrewPlayer, take_turns

GROUPS = "1,2,4,8,16,32,40"
COLUMNS = (
    report.TRANSPORT,
    report.Column("groups", 6, "groups", str),
    report.Column("idle", 4, "idle", str),
    *report.MOVED,
    *report.TIMES,
    report.Column("µs/request", 10, "per_request_us", "{:.2f}".format),
    report.Column("raw p50", 11, "baseline_p50_us", "{:.1f}".format),
    report.RATIO,
)


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    options = _parser().parse_args(argv)
    cores = choose_cores(options.cores)
    facts = report.begin(options, cores)
    table = report.Table(COLUMNS)
    print(table.header(), flush=True)
    measure = _idle if options.idle else _groups
    total = options.rounds * (1 if options.idle else len(options.groups))
    rows = []
    with report.Progress(total, "fanin") as bar:
        for row in measure(options, cores, nodes, bar):
            bar.print(table.line(row))
            rows.append(row)
    more: dict[str, Any] = {}
    if options.idle:
        more["idle_ratio"] = round(rows[1]["p50_us"] / rows[0]["p50_us"], 3)
        print(
            f"\nwith {options.idle} idle groups beside it, a batch takes {more['idle_ratio']:.2f} "
            "times as long"
        )
    elif len(rows) > 1:
        more["fit"] = fit([(row["groups"], row["p50_us"]) for row in rows])
        print(
            "\ntime of a batch = {fixed_us:.1f} µs + {per_group_us:.2f} µs x groups "
            "(R² {r2:.3f}); it grows with the {exponent:.2f}th power of the number of "
            "groups".format(**more["fit"])
        )
    report.finish(options, "fanin", facts, rows, **more)
    return 0


def fit(points: Sequence[tuple[int, float]]) -> dict[str, float]:
    """The line through (groups, µs) with the least squares, how much of the spread it explains,
    and the power of groups with which the time grows (1: linearly)."""
    fixed, slope, r2 = _line(points)
    _, exponent, _ = _line([(math.log(n), math.log(us)) for n, us in points])
    return {
        "fixed_us": round(fixed, 3),
        "per_group_us": round(slope, 3),
        "r2": round(r2, 4),
        "exponent": round(exponent, 3),
    }


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Intercept, slope and R²."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    xx = sum((x - mean_x) ** 2 for x, _ in points)
    xy = sum((x - mean_x) * (y - mean_y) for x, y in points)
    slope = xy / xx
    fixed = mean_y - slope * mean_x
    left = sum((y - fixed - slope * x) ** 2 for x, y in points)
    spread = sum((y - mean_y) ** 2 for _, y in points)
    return fixed, slope, 1 - left / spread if spread else 1.0


def _groups(
    options: argparse.Namespace,
    cores: tuple[int, int] | None,
    nodes: Nodes,
    bar: report.Progress,
) -> Iterator[dict[str, Any]]:
    """A cluster after the other, in the same processes."""
    worker_core, server_core = cores or (None, None)
    names = [f"worker {i}" for i in range(options.processes)]
    members = [Member(name, "peers.WorkerPart", "worker", worker_core) for name in names]
    members.append(Member("server", "peers.ServerPart", "server", server_core))
    case = Case("push_pull", (options.size,), (options.size,))
    with contextlib.ExitStack() as stack:
        crew = stack.enter_context(start(members, nodes))
        raw, says = None, dict[str, Any]()
        for groups in options.groups:
            dealt = {name: len(range(i, groups, len(names))) for i, name in enumerate(names)}
            with crew.cluster(options.transport, dealt):
                transport = "+".join(crew.workers("links")[0])
                if not says:
                    way = baseline_of(transport)
                    raw, says = open_baseline(stack, options, way, cores)
                player = CrewPlayer(crew)
                player.prepare(case)
                if raw:
                    raw.prepare(options.size, options.size)
                *baseline, measured = take_turns(
                    [raw, player] if raw else [player],
                    options.rounds,
                    options.seconds,
                    options.iters,
                    done=bar.step,
                )
            yield _row(transport, groups, 0, case, measured, baseline, says)


def _idle(
    options: argparse.Namespace,
    cores: tuple[int, int] | None,
    nodes: Nodes,
    bar: report.Progress,
) -> Iterator[dict[str, Any]]:
    """A pair alone and a pair with idle groups beside it, in turn."""
    worker_core, server_core = cores or (None, None)
    worker = Member("worker", "peers.WorkerPart", "worker", worker_core)
    case = Case("push_pull", (options.size,), (options.size,))
    with contextlib.ExitStack() as stack:
        server = Member("server", "idlers.EagerServerPart", "server", server_core)
        idlers = Member("idlers", "idlers.IdlersPart", "worker", worker_core, options.idle)
        alone = stack.enter_context(start([worker, server], nodes))
        beside = stack.enter_context(start([worker, idlers, server], nodes))
        for crew in (alone, beside):
            stack.enter_context(crew.cluster(options.transport))
        transport = "+".join(beside.workers("links")[0])
        raw, says = open_baseline(stack, options, baseline_of(transport), cores)
        players = [IdlersPlayer(alone), IdlersPlayer(beside)]
        for player in players:
            player.prepare(case)
        if raw:
            raw.prepare(options.size, options.size)
        *baseline, without, with_idle = take_turns(
            [raw, *players] if raw else players,
            options.rounds,
            options.seconds,
            options.iters,
            done=bar.step,
        )
    for idle, measured in ((0, without), (options.idle, with_idle)):
        yield _row(transport, 1, idle, case, measured, baseline, says)


def _row(
    transport: str,
    groups: int,
    idle: int,
    case: Case,
    measured: list[Any],
    baseline: list[Any],
    says: dict[str, Any],
) -> dict[str, Any]:
    """Of one number of groups: p50 is of a batch, the ratio is of a request to a raw one."""
    raw = baseline[0] if baseline else []
    row = report.row(transport, case.op, sum(case.out), sum(case.back), measured, raw, **says)
    row["per_request_us"] = round(row["p50_us"] / groups, 3)
    if raw:
        row["ratio"] = round(row["per_request_us"] / row["baseline_p50_us"], 3)
    row["gbps"] = round(row["gbps"] * groups, 4)
    return {**row, "groups": groups, "idle": idle}


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "fanin",
        "Measures one server with 1 to 40 worker groups. A batch is one push_pull of each "
        "group. Its time is measured from the first call to the last answer. The benchmark "
        "prints the time per batch and per request, and how it grows with the number of groups. "
        "The baseline is the raw round trip of one request. The ratio is the time per request "
        "divided by the baseline. With --idle N, it compares a pair alone with a pair whose "
        "server has N more groups that send no request; both servers call "
        f"get_batch(at_least=1). {CHECKED}",
        seconds=(0.2, "approximate length of a round, for each number of groups"),
        rounds=5,
    )
    add = made.add_argument
    add(
        "--groups",
        type=numbers,
        default=GROUPS,
        metavar="LIST",
        help=f"numbers of worker groups (default {GROUPS})",
    )
    add(
        "--idle",
        type=positive,
        metavar="N",
        help="measure one group beside N idle groups, instead of --groups",
    )
    add(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help="number of processes that share the groups (default 1)",
    )
    add(
        "--size",
        type=size,
        default="4K",
        help="bytes of a request in each direction (default 4K)",
    )
    return made
