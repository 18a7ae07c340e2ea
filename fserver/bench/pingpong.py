"""`fserver bench pingpong`: round trips of the Python API, compared with the same copies in C."""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from . import against, crew, report, rivals
from . import options as opts
from .baseline import Baseline, baseline_of, compiled
from .crew import Case, Crew, Member, Nodes
from .errors import BenchError
from .host import NO_ADDRESS, own_address, transport_settings
from .joint import joint
from .remote import far_baseline
from .report import Figures
from .run import Raw, Run, need_gpu
from .turns import CrewPlayer

OPS = ("push", "pull", "push_pull")
SIZES = "64,4K,64K,1M,16M,64M"
SMALL = 64  # bytes that a pull sends, and that the baseline sends for an answer without data
BESIDE = (*rivals.WAYS, "shm", "c++", "none")
COLUMNS = (
    report.Column("place", -6, "place"),
    report.Column("device", -6, "device"),
    *report.COLUMNS,
)
BESIDE_HELP = (
    f"what takes turns too in place local: some of {', '.join(BESIDE)} (default "
    f"{','.join(rivals.ON_GPUS)} for tensors on GPUs, else none)"
)
AGAINST_HELP = (
    f"compare with another checkout of fserver, by {against.ROUNDS} rounds of each build. The exit "
    f"status is 1 if the interval of a ratio lies wholly above {against.LIMIT}"
)
PARSER = opts.parser(
    "pingpong",
    "Measures push_pull and wait between a worker and a server: two processes, each on a core of "
    "its own. The transports take turns, and so do two processes in C that move the same bytes on "
    "the same cores (the columns raw). The figures are medians over the rounds. GB/s counts the "
    f"bytes of both directions. The ratio is p50 divided by raw p50. {opts.CHECKED} With tensors "
    "on GPUs, the numbers in the answers to push and pull are checked between rounds only. If "
    "several transports, devices or places are given, one that cannot be had is skipped with the "
    "reason. docs/benchmarks.md describes the places, what is beside fserver, and two hosts.",
    ("--transport", opts.names, "auto", f"the transports: {opts.TRANSPORTS}"),
    ("--places", opts.some_of(opts.PLACES), "local", f"some of {', '.join(opts.PLACES)}"),
    ("--device", opts.some_of(("cpu", "gpu")), "cpu", "where the tensors are: cpu, gpu, or both"),
    ("--sizes", opts.exchanges, SIZES, "sizes in bytes, for both directions or as OUT:BACK"),
    ("--tensors", opts.positive, 1, "tensors of that size in each push and in each answer"),
    ("--ops", opts.some_of(OPS), ",".join(OPS), "operations to measure"),
    ("--shared", bool, False, "measure each transport also with pushes of shared tensors"),
    ("--beside", opts.some_of(BESIDE), None, BESIDE_HELP),
    ("--against", against.checkout, None, AGAINST_HELP),
    opts.seconds_of(0.2, "approximate length of a round of each way"),
    *opts.TWO_HOSTS,
    rounds=7,
)


class Way(NamedTuple):
    """A player and the name of its rows, or the reason why there is no player."""

    name: str
    player: Any = None
    raw: Raw | None = None
    reason: str | None = None
    shared: bool = False  # it pushes tensors in shared memory
    gpus: tuple[int, int] | None = None


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    options = _options(argv)
    apart = list(itertools.product(options.places, options.device))
    steps = len(apart) * len(options.sizes) * len(options.ops) * options.rounds
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
        for place, device in apart:
            planned = cases(options.sizes, options.ops, device, options.tensors)
            for row in _rows(run, place, planned):
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
        against.check(options.against, options.rounds)
    return options


def _serve(run: Run) -> None:
    """Does what the worker says, which is on the other host."""
    print(f"bench: the server waits for the worker at {run.options.scheduler}", file=sys.stderr)
    run.enter_context(_far(run, "remote.ObeyingServer", "server")).all("serve", timeout=24 * 3600)


@contextlib.contextmanager
def _far(run: Run, actor: str, role: str) -> Iterator[Crew]:
    """The process of this host; the other one is on the other host."""
    options, core = run.options, run.cores and run.cores[role == "server"]
    with crew.start([Member(role, actor, role, core)], run.nodes) as one:
        with one.cluster(options.transport[0], host=options.host, scheduler=options.scheduler):
            yield one


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
    transports = ["tcp"] if place == "remote" and not options.role else options.transport
    alone = len(transports) * len(options.places) * len(options.device) == 1
    host = own_address() if place == "remote" and not options.role else None
    raws: dict[str | None, Raw] = {}
    for transport, shared in itertools.product(transports, [False, True][: 1 + options.shared]):
        try:
            two = stack.enter_context(_pair(run, place, transport, device, host))
        except BenchError as error:
            if alone:
                raise
            yield Way(transport, reason=error.reason)
            continue
        player = CrewPlayer(two)
        if device == "gpu":  # how that travels is known when it has
            player.prepare(planned[0])
            player.check(0)
        name = two.transport()
        way = "raw tcp" if options.role else baseline_of(name)
        if way not in raws:
            where = "{},{}".format(*two.gpus) if way == "raw gpu" else host
            make = functools.partial(far_baseline, two) if options.role else Baseline
            raws[way] = run.open_raw(way, where, make, stack)
        yield Way(name, player, raws[way], None, shared, two.gpus)


def _pair(
    run: Run, place: str, transport: str, device: str, host: str | None
) -> contextlib.AbstractContextManager[Crew]:
    """Worker and server of a place; between two hosts, the worker."""
    if run.options.role and device == "gpu":
        raise BenchError("between two hosts, only CPU tensors are measured")
    if device == "gpu":
        need_gpu()
    if run.options.role:
        return _far(run, "remote.CommandingWorker", "worker")
    if place == "joint":
        return joint(transport, run.cores, device)
    if place == "remote" and not host:
        raise BenchError(NO_ADDRESS)
    return crew.pair(run.nodes, transport, run.cores, host=host, device=device)


def _others(
    run: Run, stack: contextlib.ExitStack, ours: Sequence[Way], planned: Sequence[Case]
) -> Iterator[Way]:
    """The other libraries and the programs of --beside. They end with the stack."""
    names, pairs = run.options.beside, [way for way in ours if way.player]
    on_gpu = planned[0].device == "gpu"
    if names is None:
        names = rivals.ON_GPUS if on_gpu else ()
    if not pairs:
        return
    gpus, raw = pairs[0].gpus if on_gpu else None, pairs[0].raw
    room = max(max(_moved(case)) for case in planned)
    libraries = [name for name in names if name in rivals.WAYS]
    for one in rivals.beside(stack, libraries, gpus, room, run.cores, run.nodes):
        yield Way(one.way, one, raw)
    if gpus and libraries:
        yield _made("wire", raw, lambda: Wire(gpus))
    if "shm" in names:
        yield _made("raw shm", Raw(), lambda: stack.enter_context(Baseline("raw shm", run.cores)))
    for way in pairs:
        if "c++" in names and not way.shared:
            program = functools.partial(_cpp, run, stack, way.name.partition("/")[0])
            yield _made(f"{way.name} C++", way.raw, program)


def _made(name: str, raw: Raw | None, make: Callable[[], Any]) -> Way:
    """The player that `make` returns, or why there is none."""
    try:
        return Way(name, make(), raw)
    except BenchError as error:
        print(f"bench: {name}: {error}", file=sys.stderr, flush=True)
        return Way(name, reason=rivals.reason(error))


def _cpp(run: Run, stack: contextlib.ExitStack, transport: str) -> Baseline:
    """cppecho.cc, over a transport."""
    command = [str(compiled("cppecho.cc")), *map(str, run.cores or (-1, -1))]
    settings = {**transport_settings(transport), "FSERVER_LOG": "warn"}
    return stack.enter_context(Baseline("C++", command=command, variables=settings))


class Wire:
    """The time that the same bytes take at the speed of a copy of 64 MiB by the copy engine."""

    unit = 1

    def __init__(self, gpus: tuple[int, int]):
        if gpus[0] == gpus[1]:
            raise BenchError("it takes two GPUs, and there is one")
        self._share, self._block = 0.0, rivals.wire(gpus)

    def prepare(self, out: int, back: int) -> None:
        """The bytes there and home."""
        self._share = (out + back) / rivals.BIG

    def check(self, seed: int) -> None:
        """Nothing moves."""

    def measure(self, warmup: int, count: int) -> Figures:
        times = {key: self._share * self._block[key] for key in ("p50_us", "p99_us")}
        return {"iters": self._block["iters"], **times}


def _moved(case: Case) -> tuple[int, int]:
    """Bytes there and home, for programs and libraries: their pushes need an answer too."""
    return sum(case.out), sum(case.back) or SMALL


def _measured(run: Run, compared: Sequence[Way], case: Case) -> Iterator[dict[str, Any]]:
    """Measures a case, and gives a row for each way."""
    playing = [way for way in compared if way.player]
    for way in playing:
        if isinstance(way.player, CrewPlayer):
            way.player.prepare(dataclasses.replace(case, shared=way.shared))
        else:
            way.player.prepare(*_moved(case))
    raws = {id(way.raw): way.raw for way in playing if way.raw}.values()
    players = [way.player for way in playing]
    found = iter(run.turns(players, *_moved(case), [*raws]) if playing else [])
    for way in compared:
        name = f"{way.name} shared" if way.shared else way.name
        figures = next(found) if way.player else []
        reason = way.reason or getattr(way.player, "reason", None)
        if reason:
            yield report.row(name, case.op, sum(case.out), sum(case.back), skipped=reason)
        else:
            yield run.row(name, case, figures, way.raw)
