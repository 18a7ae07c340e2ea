"""`fserver bench bond`: one connection over several interfaces, RDMA devices or queue pairs."""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from . import options as opts
from . import report
from .crew import SERVE_S, Case, Nodes, members, start
from .run import Run
from .turns import FreshPlayer, Way

ROLES = ("worker", "server")
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


class Bonded(FreshPlayer):
    """Adds the members of the connection, before and after. Where the worker is on another host,
    it serves."""

    def round(self, warmup: int, count: int) -> report.Figures:
        if self.crew.peers[0].name == "server":
            self.crew.all("serve", timeout=SERVE_S)
            return {"iters": count, "p50_us": 1.0, "p99_us": 1.0, "members": ([], [])}
        before = self.crew.one("worker", "members", PATIENCE)
        found = super().round(warmup, count)
        return {**found, "members": (before, self.crew.one("worker", "members"))}


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    options = PARSER.parse_args(argv)
    if bool(options.interfaces) == bool(options.devices):
        PARSER.error("give either --interfaces (TCP) or --devices (RDMA)")
    opts.check_hosts(PARSER, options)
    compared = settings(options)
    with Run("bond", options, nodes, COLUMNS, options.rounds * len(options.sizes)) as run:
        crew = run.enter_context(start(members(run.cores, options.role), nodes))
        where = {"host": options.host, "scheduler": options.scheduler}
        transport = "tcp" if options.interfaces else "verbs"
        ways = [
            Way(name, Bonded(crew, transport, **where, by_role=by_role))
            for name, by_role in compared.items()
        ]
        for way in ways:
            way.raw = ways[0]
        rows = _rows(run, ways)
        if options.role == "server":
            print(f"bench: the server waits for the worker at {options.scheduler}", file=sys.stderr)
            list(rows)
        else:
            run.table(rows)
    return 0


def _rows(run: Run, ways: Sequence[Way]) -> Iterator[dict[str, Any]]:
    """The rows of all sizes; on the host of the server there is nothing in them."""
    for size in run.options.sizes:
        case = Case("push_pull", (size,), (size,))
        run.measure(ways, case)
        for way in ways:
            seen = [one["members"] for one in way.rounds]
            yield {**way.row(case), "over": way.name, "members": shares(seen)}


def settings(options: argparse.Namespace) -> dict[str, dict[str, dict[str, str]]]:
    """The settings of each role, by the name of what is compared; the baseline is first."""
    if options.interfaces:
        both = options.interfaces, options.server_interfaces or options.interfaces
        return {
            "+".join(options.interfaces[:count]): {
                role: {"DMLC_INTERFACE": ",".join(names[:count])}
                for role, names in zip(ROLES, both, strict=True)
            }
            for count in (1, None)
        }
    both = options.devices, options.server_devices or options.devices
    found = {}
    for lag, pairs in itertools.product(options.lag, options.pairs):
        name = f"{'+'.join(options.devices)} x {pairs}" + (f", lag {lag}" if lag != "0" else "")
        common = {"STEPAF_QP_NUM": str(pairs), "STEPMESH_SPLIT_QP_LAG": lag}
        found[name] = {
            role: {**common, "FSERVER_RDMA_DEVICE": ",".join(names)}
            for role, names in zip(ROLES, both, strict=True)
        }
    return found


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
