"""`fserver bench pingpong`: round trips of the Python API, compared with the same copies in C."""

import argparse
import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from . import against, report
from . import options as opts
from .baseline import Baseline, baseline_of, compiled, program
from .crew import Case, Crew, Nodes, connected, members, serve
from .errors import BenchError
from .host import NO_ADDRESS, own_address, transport_settings
from .run import SMALL, Run, need_gpu
from .turns import CrewPlayer, Way

OPS = ("push", "pull", "push_pull")
PLACES = ("local", "remote")
SIZES = "64,4K,64K,1M,16M,64M"
LIBRARIES = (*opts.ON_GPUS, *opts.ON_CPU)
BESIDE = (*LIBRARIES, "shm", "c++", "none")
COLUMNS = (
    report.Column("place", -6, "place"),
    report.Column("device", -6, "device"),
    *report.COLUMNS,
)
PARSER = opts.parser(
    "pingpong",
    "Measures push_pull and wait between a worker and a server: two processes, each on a core of "
    "its own. The transports take turns, and so do two processes in C that move the same bytes on "
    "the same cores (the columns raw). The figures are medians over the rounds. GB/s counts the "
    f"bytes of both directions. The ratio is p50 divided by raw p50. {opts.CHECKED} "
    "docs/benchmarks.md describes the places, what is beside fserver, and two hosts.",
    ("--transport", opts.names, "auto", f"the transports: {opts.TRANSPORTS}"),
    ("--places", opts.some_of(PLACES), "local", f"some of {', '.join(PLACES)}"),
    ("--device", opts.some_of(("cpu", "gpu")), "cpu", "where the tensors are: cpu, gpu, or both"),
    ("--sizes", opts.exchanges, SIZES, "sizes in bytes, for both directions or as OUT:BACK"),
    ("--tensors", opts.positive, 1, "tensors of that size in each push and in each answer"),
    ("--ops", opts.some_of(OPS), ",".join(OPS), "operations to measure"),
    ("--shared", bool, False, "measure each transport also with pushes of shared tensors"),
    ("--beside", opts.some_of(BESIDE), None, f"in place local, some of {', '.join(BESIDE)}"),
    ("--against", against.checkout, None, "compare with another checkout; status 1 if slower"),
    opts.seconds_of(0.2, "approximate length of a round of each way"),
    *opts.TWO_HOSTS,
    rounds=7,
)


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    options = _options(argv)
    apart = list(itertools.product(options.places, options.device))
    steps = len(apart) * len(options.sizes) * len(options.ops) * options.rounds
    columns: Sequence[report.Column] = COLUMNS if len(apart) > 1 else report.COLUMNS
    if options.against:
        columns, steps = against.COLUMNS, steps * len(options.transport)
    with Run("pingpong", options, nodes, columns, steps) as run:
        if options.role == "server":
            serve(_pair(run, "remote", options.transport[0], "cpu", None), options.scheduler)
            return 0
        run.table(row for place, device in apart for row in _rows(run, place, device))
    return against.judge(options, run.rows) if options.against else 0


def cases(
    sizes: Sequence[tuple[int, int]], ops: Sequence[str], device: str = "cpu", tensors: int = 1
) -> list[Case]:
    """Each size, there and home, with every op, each under keys of its own. A push and an answer
    have as many tensors of that size as `tensors` says."""
    found = []
    for at, ((out, back), op) in enumerate(itertools.product(sizes, ops)):
        there = (SMALL if op == "pull" else out,) * tensors
        home = () if op == "push" else (back,) * tensors
        found.append(Case(op, there, home, at * tensors, device=device))
    return found


def _options(argv: list[str]) -> argparse.Namespace:
    """The options, checked, with defaults that depend on others."""
    options = PARSER.parse_args(argv)
    opts.check_hosts(PARSER, options)
    if options.role:
        options.places = ["remote"]
        if options.transport[1:]:
            PARSER.error("--role: want one --transport")
    if options.shared and (options.places, options.device) != (["local"], ["cpu"]):
        PARSER.error("--shared: want --places local and --device cpu")
    if options.against:
        if options.beside or options.shared or options.places != ["local"] or options.device[1:]:
            PARSER.error("--against: want --places local, one --device, no --beside, no --shared")
        options = PARSER.parse_args(argv, argparse.Namespace(rounds=against.ROUNDS))
        if options.rounds < 6:
            PARSER.error("--against: want --rounds 6 or more: fewer give no interval of 95 %")
    return options


def _rows(run: Run, place: str, device: str) -> Iterator[dict[str, Any]]:
    options, where = run.options, {"place": place, "device": device}
    planned = cases(options.sizes, options.ops, device, options.tensors)
    if options.against:
        for transport in options.transport:
            with contextlib.ExitStack() as stack:
                way = against.way(run, stack, transport, device)
                for case in planned:
                    run.measure([way], case)
                    yield {**where, **against.row(way, case)}
        return
    with contextlib.ExitStack() as stack:
        ways = [*_ours(run, stack, place, planned[0])]
        if place == "local" and any(way.player for way in ways):
            ways += _others(run, stack, [way for way in ways if way.player], planned)
        for case in planned:
            run.measure(ways, case)
            yield from ({**where, **way.row(case)} for way in ways)


def _ours(run: Run, stack: contextlib.ExitStack, place: str, case: Case) -> Iterator[Way]:
    """A pair for each transport, and another one for shared tensors. They end with the stack."""
    options = run.options
    transports = ["tcp"] if place == "remote" and not options.role else options.transport
    alone = len(transports) * len(options.places) * len(options.device) == 1
    host = own_address() if place == "remote" and not options.role else None
    for transport, shared in itertools.product(transports, [False, True][: 1 + options.shared]):
        try:
            two = stack.enter_context(_pair(run, place, transport, case.device, host))
        except BenchError as error:
            if alone:
                raise
            yield Way(transport, reason=error.reason)
            continue
        player = CrewPlayer(two, shared)
        if case.device == "gpu":  # how that travels is known when it has
            player.prepare(case)
            player.check(0)
        name = two.transport()
        where = "{},{}".format(*two.gpus) if baseline_of(name) == "raw gpu" else host
        yield Way(f"{name} shared" if shared else name, player, run.raw(name, where))


def _pair(
    run: Run, place: str, transport: str, device: str, host: str | None
) -> contextlib.AbstractContextManager[Crew]:
    """Worker and server of a place; of two hosts, the one of this host."""
    options = run.options
    if device == "gpu":
        if options.role:
            raise BenchError("between two hosts, only CPU tensors are measured")
        need_gpu()
    if place == "remote" and not (host or options.role):
        raise BenchError(NO_ADDRESS)
    where = {"host": host or options.host, "scheduler": options.scheduler, "device": device}
    return connected(members(run.cores, options.role), run.nodes, transport, **where)


def _others(
    run: Run, stack: contextlib.ExitStack, ours: Sequence[Way], planned: Sequence[Case]
) -> Iterator[Way]:
    """The other libraries, which end with the stack, and the programs of --beside."""
    raw, on_gpu = ours[0].raw, planned[0].device == "gpu"
    gpus = ours[0].player.crew.gpus if on_gpu else None
    names = run.options.beside or (opts.ON_GPUS if on_gpu else ())
    room = max(SMALL, *(sum(sizes) for case in planned for sizes in (case.out, case.back)))
    if libraries := [name for name in names if name in LIBRARIES]:
        from . import rivals  # with torch, which takes seconds

        for one in rivals.beside(stack, libraries, gpus, room, run.cores, run.nodes):
            yield Way(one.way, one, raw)
    if "shm" in names:
        yield run.way("raw shm", lambda: program("raw shm", run.cores))
    for way in ours:
        if "c++" in names and not way.player.shared:
            cpp = functools.partial(_cpp, run, way.name.partition("/")[0])
            yield run.way(f"{way.name} C++", cpp, way.raw)


def _cpp(run: Run, transport: str) -> Baseline:
    command = [str(compiled("cppecho.cc")), *map(str, run.cores)]
    settings = {"STEPMESH_BACKEND": "CPU", "FSERVER_LOG": "warn", **transport_settings(transport)}
    return Baseline("C++", command, **settings)
