"""`fserver bench pingpong`: round trips of the Python API, compared with the same copies in C."""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from . import against, report, rivals
from .baseline import Baseline, baseline_of, compiled
from .crew import (
    NO_ADDRESS,
    Case,
    Crew,
    Member,
    Nodes,
    own_address,
    pair,
    start,
    transport_settings,
)
from .errors import BenchError, GaveUpError
from .joint import joint
from .libraries import BIG, ON_GPUS
from .options import (
    CHECKED,
    TRANSPORTS,
    TWO_HOSTS,
    check_hosts,
    exchanges,
    names,
    parser,
    positive,
    seconds_of,
    some_of,
)
from .remote import far_baseline
from .run import Raw, Run, need_gpu
from .turns import CrewPlayer, Figures

PLACES = ("local", "remote", "joint")
OPS = ("push", "pull", "push_pull")
SIZES = "64,4K,64K,1M,16M,64M"
SMALL = 64  # bytes that a pull sends, and that the baseline sends for an answer without data
BESIDE = (*rivals.WAYS, "shm", "c++", "none")
COLUMNS = (
    report.Column("place", -6, "place"),
    report.Column("device", -6, "device"),
    *report.COLUMNS,
)
PARSER = parser(
    "pingpong",
    "Measures push_pull and wait between a worker and a server: two processes, each on a core of "
    "its own. The transports take turns, and so do two processes in C that move the same bytes on "
    "the same cores (the columns raw). The figures are medians over the rounds. GB/s counts the "
    f"bytes of both directions. The ratio is p50 divided by raw p50. {CHECKED} With tensors on "
    "GPUs, the numbers in the answers to push and pull are checked between rounds only. If "
    "several transports, devices or places are given, one that cannot be had is skipped with the "
    "reason. docs/benchmarks.md describes the places, what is beside fserver, and two hosts.",
    ("--transport", names, "auto", f"the transports: {TRANSPORTS}"),
    ("--places", some_of(PLACES), "local", f"some of {', '.join(PLACES)}"),
    ("--device", some_of(("cpu", "gpu")), "cpu", "where the tensors are: cpu, gpu, or both"),
    ("--sizes", exchanges, SIZES, "sizes in bytes, for both directions or as OUT:BACK"),
    ("--tensors", positive, 1, "tensors of that size in each push and in each answer"),
    ("--ops", some_of(OPS), ",".join(OPS), "operations to measure"),
    ("--shared", bool, False, "measure each transport also with pushes of shared tensors"),
    (
        "--beside",
        some_of(BESIDE),
        None,
        f"what takes turns too in place local: some of {', '.join(BESIDE)} (default "
        f"{','.join(ON_GPUS)} for tensors on GPUs, else none)",
    ),
    (
        "--against",
        against.checkout,
        None,
        f"compare with another checkout of fserver, by {against.ROUNDS} rounds of each build. The "
        f"exit status is 1 if the interval of a ratio lies wholly above {against.LIMIT}",
    ),
    seconds_of(0.2, "approximate length of a round of each way"),
    *TWO_HOSTS,
    rounds=7,
)


class Way(NamedTuple):
    """What takes turns under a name, or why it cannot."""

    name: str
    player: Any = None
    raw: Raw | None = None
    reason: str | None = None
    shared: bool = False  # it pushes tensors in shared memory
    gpus: tuple[int, int] | None = None


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    options = _options(argv)
    apart = [(place, device) for place in options.places for device in options.device]
    planned = [cases(options.sizes, options.ops, device, options.tensors) for _, device in apart]
    steps = sum(map(len, planned)) * options.rounds
    columns = COLUMNS if len(apart) > 1 else report.COLUMNS
    if options.against:
        columns, steps = against.COLUMNS, steps * len(options.transport)
    with Run("pingpong", options, nodes, columns, steps) as run:
        if options.role == "server":
            _serve(run)
            return 0
        if options.against:
            run.facts["against"] = against.name(options.against)
            print(f"against {run.facts['against']}", flush=True)
        run.header()
        for (place, device), some in zip(apart, planned, strict=True):
            for row in _rows(run, place, some):
                run.add({"place": place, "device": device, **row})
        run.finish()
    return against.judge(options, run.rows) if options.against else 0


def cases(
    sizes: Sequence[tuple[int, int]], ops: Sequence[str], device: str = "cpu", tensors: int = 1
) -> list[Case]:
    """Each size, there and home, with every op, each under keys of its own. A push and an answer
    have as many tensors of that size as `tensors` says."""
    shapes = [(op, *size) for size in sizes for op in ops]
    return [
        Case(
            op,
            (SMALL if op == "pull" else out,) * tensors,
            () if op == "push" else (back,) * tensors,
            index * tensors,
            device=device,
        )
        for index, (op, out, back) in enumerate(shapes)
    ]


def _options(argv: list[str]) -> argparse.Namespace:
    """The options, checked, with defaults that depend on others."""
    options = PARSER.parse_args(argv)
    check_hosts(PARSER, options)
    if options.role:
        options.places = ["remote"]
    here = (options.places, options.device) == (["local"], ["cpu"])
    if options.shared and not here:
        PARSER.error("--shared: want --places local and --device cpu")
    if options.against:
        if options.beside or options.shared or options.places != ["local"] or options.device[1:]:
            PARSER.error("--against: want --places local, one --device, no --beside, no --shared")
        options = PARSER.parse_args(argv, argparse.Namespace(rounds=against.ROUNDS))
        against.check(options.against, options.rounds)
    return options


def _serve(run: Run) -> None:
    """The server's host, of two."""
    print(f"bench: the server waits for the worker at {run.options.scheduler}", file=sys.stderr)
    crew = run.enter_context(_far(run, "remote.ObeyingServer", "server"))
    crew.all("serve", timeout=24 * 3600)


@contextlib.contextmanager
def _far(run: Run, part: str, role: str) -> Iterator[Crew]:
    """The process of this host, of two."""
    options, core = run.options, run.cores and run.cores[role == "server"]
    with start([Member(role, part, role, core)], run.nodes) as crew:
        with crew.cluster("tcp", host=options.host, scheduler=options.scheduler):
            yield crew


def _rows(run: Run, place: str, planned: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """The rows of a place and a device."""
    if run.options.against:
        for transport in run.options.transport:
            yield from against.rows(run, transport, planned)
        return
    with contextlib.ExitStack() as stack:
        compared = [*_ours(run, stack, place, planned)]
        if place == "local":
            compared += _others(run, stack, compared, planned)
        for case in planned:
            yield from _measured(run, compared, case)


def _ours(
    run: Run, stack: contextlib.ExitStack, place: str, planned: Sequence[Case]
) -> Iterator[Way]:
    """A pair for each transport, and another one for shared tensors. They end with the stack."""
    options, device = run.options, planned[0].device
    transports = ["tcp"] if place == "remote" else options.transport
    alone = len(transports) * len(options.places) * len(options.device) == 1
    host = own_address() if place == "remote" and not options.role else None
    raws: dict[str | None, Raw] = {}
    for transport, shared in itertools.product(transports, [False, True][: 1 + options.shared]):
        try:
            crew = stack.enter_context(_pair(run, place, transport, device, host))
        except BenchError as error:
            if alone:
                raise
            yield Way(transport, reason=error.reason)
            continue
        player = CrewPlayer(crew)
        if device == "gpu":  # how that travels is known when it has
            player.prepare(planned[0])
            player.check(0)
        name = crew.transport()
        way = baseline_of(name)
        if way not in raws:
            where = "{},{}".format(*crew.gpus) if way == "raw gpu" else host
            make = functools.partial(far_baseline, crew) if options.role else Baseline
            raws[way] = run.open_raw(way, where, make, stack)
        yield Way(name, player, raws[way], None, shared, crew.gpus)


@contextlib.contextmanager
def _pair(run: Run, place: str, transport: str, device: str, host: str | None) -> Iterator[Crew]:
    """Worker and server of a place; between two hosts, the worker."""
    if device == "gpu":
        need_gpu()
    if run.options.role:
        if device == "gpu":
            raise BenchError("between two hosts, only CPU tensors are measured")
        made = _far(run, "remote.CommandingWorker", "worker")
    elif place == "joint":
        made = joint(transport, run.cores, device)
    elif place == "remote" and not host:
        raise BenchError(NO_ADDRESS)
    else:
        made = pair(run.nodes, transport, run.cores, host=host, device=device)
    with made as crew:
        yield crew


def _others(
    run: Run, stack: contextlib.ExitStack, ours: Sequence[Way], planned: Sequence[Case]
) -> Iterator[Way]:
    """What takes turns with our pairs. They end with the stack."""
    on_gpu = planned[0].device == "gpu"
    names = run.options.beside
    if names is None:
        names = ON_GPUS if on_gpu else ()
    pairs = [way for way in ours if way.player]
    if not pairs:
        return
    gpus, raw = pairs[0].gpus if on_gpu else None, pairs[0].raw
    room = max(max(_moved(case)) for case in planned)
    libraries = [name for name in names if name in rivals.WAYS]
    for one in rivals.beside(stack, libraries, gpus, room, run.cores, run.nodes):
        yield Way(one.way, one, raw)
    if gpus and libraries:
        yield Way("wire", Wire(gpus), raw)
    if "shm" in names:
        yield _program(run, stack, "raw shm", Raw())
    for way in pairs:
        if "c++" in names and not way.shared:
            yield _program(run, stack, f"{way.name} C++", way.raw, way.name.partition("/")[0])


def _program(
    run: Run, stack: contextlib.ExitStack, name: str, raw: Raw | None, transport: str | None = None
) -> Way:
    """A raw baseline with a row of its own; or cppecho.cc, over this transport."""
    how: dict[str, Any] = {}
    try:
        if transport:
            cores = [str(core) for core in run.cores or (-1, -1)]
            settings = {**transport_settings(transport), "FSERVER_LOG": "warn"}
            how = {"command": [str(compiled("cppecho.cc")), *cores], "variables": settings}
        return Way(name, stack.enter_context(Baseline(name, run.cores, **how)), raw)
    except BenchError as error:
        return Way(name, reason=error.reason)


class Wire:
    """The time that the same bytes take at the speed of a copy of 64 MiB by the copy engine."""

    unit = 1

    def __init__(self, gpus: tuple[int, int]):
        self.reason: str | None = None
        self._share, self._block = 0.0, Figures()
        try:
            if gpus[0] == gpus[1]:
                raise BenchError("it takes two GPUs, and there is one")
            self._block = rivals.wire(gpus)
        except BenchError as error:
            print(f"bench: wire: {error}", file=sys.stderr, flush=True)
            self.reason = rivals.reason(error)

    def prepare(self, out: int, back: int) -> None:
        """The bytes there and home."""
        self._share = (out + back) / BIG

    def check(self, seed: int) -> None:
        if self.reason:
            raise GaveUpError(self.reason)

    def measure(self, warmup: int, count: int) -> Figures:
        times = {key: self._share * self._block[key] for key in ("p50_us", "p99_us")}
        return {"iters": self._block["iters"], **times}


def _moved(case: Case) -> tuple[int, int]:
    """Bytes there and home of those that need an answer to know that what they sent has come."""
    return sum(case.out), sum(case.back) or SMALL


def _measured(run: Run, compared: Sequence[Way], case: Case) -> Iterator[dict[str, Any]]:
    """A row of each, of a case."""
    playing = [way for way in compared if way.player]
    for way in playing:
        if isinstance(way.player, CrewPlayer):
            way.player.prepare(dataclasses.replace(case, shared=way.shared))
        else:
            way.player.prepare(*_moved(case))
    raws = {id(way.raw): way.raw for way in playing if way.raw}
    players = [way.player for way in playing]
    found = iter(run.turns(players, *_moved(case), [*raws.values()]) if playing else [])
    for way in compared:
        name = f"{way.name} shared" if way.shared else way.name
        figures = next(found) if way.player else []
        reason = way.reason or getattr(way.player, "reason", None)
        if reason:
            moved = sum(case.out), sum(case.back)
            yield report.row(name, case.op, *moved, skipped=reason)
        else:
            yield run.row(name, case, figures, way.raw)
