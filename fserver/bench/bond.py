"""`fserver bench bond`: one connection over several interfaces, RDMA devices or queue pairs."""

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from . import options as opts
from . import report
from .actors import WorkerActor
from .crew import Case, Crew, Member, Nodes, pair_of, start
from .remote import CommandingWorker
from .run import Run
from .turns import CrewPlayer, take_turns

LAGS = ("0", "1", "port1", "port2")
COLUMNS = (
    report.Column("over", -24, "over"),
    report.Column("bytes", 8, "bytes_out", report.show_size),
    *report.TIMES,
    report.SPEED,
    report.RATIO,
    report.Column("share of each", -40, "members", lambda members: show(members)),
)
PATIENCE = 5.0  # seconds until all members are connected
PARSER = opts.parser(
    "bond",
    "Measures push_pulls over one connection that is made of several network interfaces, RDMA "
    "devices, or queue pairs. Prints the ratio to the first line of that size, and the share of "
    f"each in the bytes. The ways take turns. {opts.CHECKED} For two hosts, run the command on "
    "both, with the same options.",
    ("--interfaces", opts.names, None, "network interfaces of the worker, for TCP"),
    ("--server-interfaces", opts.names, None, "those of the server (default: the same)"),
    ("--devices", opts.names, None, "RDMA devices of the worker"),
    ("--server-devices", opts.names, None, "those of the server (default: the same)"),
    ("--pairs", opts.numbers, "1,2,4", "queue pairs over each device"),
    ("--lag", opts.some_of(LAGS), "0", f"of STEPMESH_SPLIT_QP_LAG, of {', '.join(LAGS)}"),
    ("--sizes", opts.sizes, "4K,1M,16M", "bytes each way"),
    ("--rounds", opts.positive, 5, "number of rounds"),
    ("--iters", opts.positive, None, "exchanges in a round, instead of --seconds"),
    opts.seconds_of(0.2, "approximate length of a round, for each way and size"),
    *opts.TWO_HOSTS,
)
Shares = list[dict[str, Any]]


class Way(NamedTuple):
    """A name, and the settings of each role."""

    name: str
    worker: dict[str, str]
    server: dict[str, str]


class Members(WorkerActor):
    """A worker that knows the members of its connection."""

    def members(self, patience: float = 0) -> Shares:
        """All members; none if it is not made of several. Waits until each is connected, but not
        for more seconds than `patience`."""
        end = time.monotonic() + patience
        while True:
            found = [m._asdict() for m in self.nodes[0].links()[0].members]
            if time.monotonic() >= end or not any(m["reason"] for m in found):
                return found
            time.sleep(0.01)


class FarMembers(Members, CommandingWorker):
    """Its server is on another host."""


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    options = PARSER.parse_args(argv)
    if bool(options.interfaces) == bool(options.devices):
        PARSER.error("give either --interfaces (TCP) or --devices (RDMA)")
    opts.check_hosts(PARSER, options)
    compared = ways(options)
    with Run("bond", options, nodes, COLUMNS, options.rounds * len(compared)) as run:
        if options.role == "server":
            _serve(run, compared)
            return 0
        run.header()
        for row in _rows(run, compared):
            run.add(row)
        run.finish()
    return 0


def ways(options: argparse.Namespace) -> list[Way]:
    """What is compared, the baseline first."""
    if options.interfaces:
        theirs = options.server_interfaces or options.interfaces
        return [
            Way("+".join(mine), *({"DMLC_INTERFACE": ",".join(each)} for each in (mine, others)))
            for mine, others in [(options.interfaces[:1], theirs[:1]), (options.interfaces, theirs)]
        ]
    both = options.devices, options.server_devices or options.devices
    found = []
    for lag, pairs in itertools.product(options.lag, options.pairs):
        name = f"{'+'.join(options.devices)} x {pairs}" + (f", lag {lag}" if lag != "0" else "")
        common = {"STEPAF_QP_NUM": str(pairs), "STEPMESH_SPLIT_QP_LAG": lag}
        own = [{**common, "FSERVER_RDMA_DEVICE": ",".join(devices)} for devices in both]
        found.append(Way(name, *own))
    return found


def _rows(run: Run, compared: Sequence[Way]) -> Iterator[dict[str, Any]]:
    """A cluster for each way and round, in the same two processes."""
    options = run.options
    worker, server = pair_of(run.cores, FarMembers if options.role else Members)
    crew = run.enter_context(start([worker] if options.role else [worker, server], run.nodes))
    results: dict[tuple[int, int], list[tuple[report.Figures, Shares, Shares]]] = {}
    for _, at in itertools.product(range(options.rounds), range(len(compared))):
        with _cluster(crew, compared[at], options):
            crew.one("worker", "members", PATIENCE)
            player = CrewPlayer(crew)
            for size in options.sizes:
                player.prepare(Case("push_pull", (size,), (size,)))
                before = crew.one("worker", "members")
                [[figures]] = take_turns([player], 1, options.seconds, options.iters)
                after = crew.one("worker", "members")
                results.setdefault((size, at), []).append((figures, before, after))
        run.step()
    for (size, at), rounds in sorted(results.items()):
        measured, first = ([figures for figures, *_ in each] for each in (rounds, results[size, 0]))
        yield {
            **report.row(_transport(options), "push_pull", size, size, measured, first),
            "over": compared[at].name,
            "baseline": compared[0].name,
            "members": shares([(before, after) for _, before, after in rounds]),
        }


def _cluster(
    crew: Crew, way: Way, options: argparse.Namespace
) -> contextlib.AbstractContextManager[None]:
    where = {"scheduler": options.scheduler, "host": options.host}
    by_role = {"worker": way.worker, "server": way.server}
    return crew.cluster(_transport(options), **where, by_role=by_role)


def _transport(options: argparse.Namespace) -> str:
    return "tcp" if options.interfaces else "verbs"


def _serve(run: Run, compared: Sequence[Way]) -> None:
    """The server of two hosts: a cluster for each one of the worker's, in the same order."""
    options = run.options
    member = Member("server", "remote.ObeyingServer", "server", run.cores and run.cores[1])
    print(f"bench: the server waits for the worker at {options.scheduler}", file=sys.stderr)
    with start([member], run.nodes) as crew:
        for _, way in itertools.product(range(options.rounds), compared):
            with _cluster(crew, way, options):
                crew.all("serve", timeout=24 * 3600)


def shares(rounds: Sequence[tuple[Shares, Shares]]) -> Shares:
    """The members with their percentage of the bytes of all rounds. A round is the members before
    and after it."""
    found = [{**member, "sent": 0} for member in rounds[-1][1]]
    for before, after in rounds:
        for member, then, now in zip(found, before, after, strict=True):
            member["sent"] += now["sent"] - then["sent"]
    total = sum(member["sent"] for member in found) or 1
    return [{**member, "share": 100 * member["sent"] / total} for member in found]


def show(members: Shares) -> str:
    """ "eth0 51 %, eth1 49 %"; with the port of a bond, if it is known."""
    parts = []
    for member in members:
        port = member["transport"].partition("/")[2]
        text = f"{member['interface']} {member['share']:.0f} %"
        parts.append(f"{text} ({port})" if port.startswith("port") else text)
    return ", ".join(parts) or "-"
