"""`fserver bench fanin`: one server and many worker groups."""

from collections.abc import Iterator
from typing import Any

from . import report
from .crew import Case, Nodes, pair_of, start
from .options import CHECKED, numbers, parser, seconds_of, size, transport_of
from .run import Run

COLUMNS = (
    report.TRANSPORT,
    report.Column("groups", 6, "groups"),
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
    f"divided by the raw round trip of one request. {CHECKED}",
    ("--groups", numbers, "1,2,4,8,16,32,40", "numbers of worker groups"),
    ("--size", size, "4K", "bytes of a request in each direction"),
    seconds_of(0.2, "approximate length of a round, for each number of groups"),
    transport_of("tcp"),
    rounds=5,
)


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    options = PARSER.parse_args(argv)
    with Run("fanin", options, nodes, COLUMNS, options.rounds * len(options.groups)) as run:
        run.table(_rows(run))
    return 0


def _rows(run: Run) -> Iterator[dict[str, Any]]:
    """A cluster after the other, in the same processes. p50 is of a batch, the ratio of one of its
    requests to a raw one."""
    options = run.options
    case = Case("push_pull", (options.size,), (options.size,))
    crew = run.enter_context(start(pair_of(run.cores), run.nodes))
    for groups in options.groups:
        with crew.cluster(options.transport, {"worker": groups}):
            way = run.ours(crew)
            run.measure([way], case)
        found = way.row(case)
        found["per_request_us"] = round(found["p50_us"] / groups, 3)
        if found["ratio"]:
            found["ratio"] = round(found["per_request_us"] / found["baseline_p50_us"], 3)
        yield {**found, "groups": groups, "gbps": round(found["gbps"] * groups, 4)}
