"""`fserver bench fanin`: one server and many worker groups."""

import math
from collections.abc import Iterator, Sequence
from statistics import correlation, linear_regression
from typing import Any

from . import report
from .actors import Actor, ServerActor
from .baseline import baseline_of
from .crew import Case, Member, Nodes, start
from .options import CHECKED, numbers, parser, positive, seconds_of, size, transport_of
from .report import Figures
from .run import Run
from .turns import CrewPlayer

COLUMNS = (
    report.TRANSPORT,
    report.Column("groups", 6, "groups"),
    report.Column("idle", 4, "idle"),
    *report.MOVED,
    *report.TIMES,
    report.number("µs/request", 10, "per_request_us", 2),
    report.RAW_P50,
    report.RATIO,
)
PARSER = parser(
    "fanin",
    "Measures one server with 1 to 40 worker groups. A batch is one push_pull of each group. Its "
    "time is measured from the first call to the last answer. The ratio is the time per request "
    "divided by the raw round trip of one request. With --idle N, it compares a pair alone with a "
    "pair whose server has N more groups that send no request; both servers call "
    f"get_batch(at_least=1). {CHECKED}",
    ("--groups", numbers, "1,2,4,8,16,32,40", "numbers of worker groups"),
    ("--idle", positive, None, "measure one group beside N idle groups, instead of --groups"),
    ("--processes", positive, 1, "number of processes that share the groups"),
    ("--size", size, "4K", "bytes of a request in each direction"),
    seconds_of(0.2, "approximate length of a round, for each number of groups"),
    transport_of("tcp"),
    rounds=5,
)


class IdlersActor(Actor):
    """Worker groups that are connected and do nothing."""

    def prepare(self, case: Case) -> None: ...

    def verify(self, seed: int) -> None: ...

    def measure(self, warmup: int, count: int) -> None: ...


class EagerServerActor(ServerActor):
    """A server that waits for no group in particular."""

    at_least = 1


class FirstPlayer(CrewPlayer):
    """A crew whose first member is the worker that is measured."""

    def measure(self, warmup: int, count: int) -> Figures:
        found: Figures = self._crew.workers("measure", warmup, count)[0]
        return found


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    options = PARSER.parse_args(argv)
    steps = options.rounds * (1 if options.idle else len(options.groups))
    with Run("fanin", options, nodes, COLUMNS, steps) as run:
        run.header()
        for row in _idle(run) if options.idle else _groups(run):
            run.add(row)
        more: dict[str, Any] = {}
        if options.idle:
            more["idle_ratio"] = round(run.rows[1]["p50_us"] / run.rows[0]["p50_us"], 3)
            print(
                f"\nwith {options.idle} idle groups beside it, a batch takes "
                f"{more['idle_ratio']:.2f} times as long"
            )
        elif len(run.rows) > 1:
            more["fit"] = fit([(row["groups"], row["p50_us"]) for row in run.rows])
            print(
                "\ntime of a batch = {fixed_us:.1f} µs + {per_group_us:.2f} µs x groups "
                "(R² {r2:.3f}); it grows with the {exponent:.2f}th power of the number of "
                "groups".format(**more["fit"])
            )
        run.finish(**more)
    return 0


def fit(points: Sequence[tuple[int, float]]) -> dict[str, float]:
    """The line through (groups, µs) with the least squares, how much of the spread it explains,
    and the power of groups with which the time grows (1: linearly)."""
    groups, times = zip(*points, strict=True)
    slope, fixed = linear_regression(groups, times)
    exponent, _ = linear_regression([math.log(n) for n in groups], [math.log(us) for us in times])
    r2 = correlation(groups, times) ** 2 if len(set(times)) > 1 else 1.0
    found = {"fixed_us": fixed, "per_group_us": slope, "r2": r2, "exponent": exponent}
    return {name: round(value, 4) for name, value in found.items()}


def _groups(run: Run) -> Iterator[dict[str, Any]]:
    """A cluster after the other, in the same processes."""
    options, cores = run.options, run.cores or (None, None)
    names = [f"worker {i}" for i in range(options.processes)]
    members = [Member(name, "actors.WorkerActor", "worker", cores[0]) for name in names]
    members.append(Member("server", "actors.ServerActor", "server", cores[1]))
    crew = run.enter_context(start(members, run.nodes))
    for groups in options.groups:
        dealt = {name: len(range(i, groups, len(names))) for i, name in enumerate(names)}
        with crew.cluster(options.transport, dealt):
            transport = crew.transport()
            if groups == options.groups[0]:
                run.open_raw(baseline_of(transport))
            [(_, row)] = _measured(run, transport, [CrewPlayer(crew)], groups)
        yield {**row, "groups": groups, "idle": 0}


def _idle(run: Run) -> Iterator[dict[str, Any]]:
    """A pair alone and a pair with idle groups beside it, in turn."""
    options, cores = run.options, run.cores or (None, None)
    worker = Member("worker", "actors.WorkerActor", "worker", cores[0])
    server = Member("server", "fanin.EagerServerActor", "server", cores[1])
    idlers = Member("idlers", "fanin.IdlersActor", "worker", cores[0], options.idle)
    crews = [
        run.enter_context(start(members, run.nodes))
        for members in ([worker, server], [worker, idlers, server])
    ]
    for crew in crews:
        run.enter_context(crew.cluster(options.transport))
    transport = crews[1].transport()
    run.open_raw(baseline_of(transport))
    for at, row in _measured(run, transport, [FirstPlayer(crew) for crew in crews], 1):
        yield {**row, "groups": 1, "idle": at * options.idle}


def _measured(
    run: Run, transport: str, players: Sequence[CrewPlayer], groups: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The players' rows: p50 is of a batch, the ratio is of a request to a raw one."""
    size = run.options.size
    case = Case("push_pull", (size,), (size,))
    for player in players:
        player.prepare(case)
    for at, measured in enumerate(run.turns(players, size, size)):
        row = run.row(transport, case, measured)
        row["per_request_us"] = round(row["p50_us"] / groups, 3)
        if row["ratio"]:
            row["ratio"] = round(row["per_request_us"] / row["baseline_p50_us"], 3)
        row["gbps"] = round(row["gbps"] * groups, 4)
        yield at, row
