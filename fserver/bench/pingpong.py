"""`fserver bench pingpong`: round trips of the Python API, compared with the same copies in C."""

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from . import options as opts
from . import report
from .baseline import SMALL
from .crew import Case, Crew, members, settings_of
from .run import Run, Way, need_gpu

SIZES = "64,4K,64K,1M,16M,64M"
LIBRARIES = (*opts.ON_GPUS, *opts.ON_CPU)
BUDGET_US = 273.0  # of a round trip: 61 layers x 3 stages at 20 tokens/s
TRACES = 4096  # push_pulls whose stamps a worker remembers
OF_MODEL = ("of_budget", "tokens_per_s", "step_ms")
BESIDE = (*LIBRARIES, "shm", "c++", "none")
PARSER = opts.parser(
    "fserver bench pingpong",
    "Measures push_pull and wait between a worker and a server: two processes, each on a core of "
    "its own. The transports take turns, and so do two processes in C that move the same bytes on "
    "the same cores (the columns raw). The number in every answer is checked. Between rounds, all "
    "bytes of an exchange are compared, in memory that held other values before. "
    "docs/benchmarks.md describes the columns, what is beside fserver, and two hosts.",
    opts.CORES,
    ("--transport", opts.listed(str), "auto", opts.TRANSPORTS),
    ("--device", opts.some_of("cpu", "gpu"), "cpu", "where the tensors are: cpu, gpu, or both"),
    ("--groups", opts.listed(opts.positive), "1", "numbers of worker groups of a process"),
    ("--workers", opts.positive, 1, "number of processes with workers, which share a core"),
    ("--servers", opts.positive, 1, "number of servers, which share a core"),
    ("--layers", opts.positive, 1, "layers of a model, in each of which all stages are exchanged"),
    ("--stages", opts.positive, 1, "number of stages (micro-batches) with tensors of their own"),
    ("--sizes", opts.listed(opts.exchange), SIZES, "bytes in both directions, or OUT:BACK"),
    ("--tensors", opts.positive, 1, "tensors of that size in each push and in each answer"),
    ("--ops", opts.some_of(*opts.OPS), ",".join(opts.OPS), "operations to measure"),
    ("--shared", bool, False, "measure each transport also with pushes of shared tensors"),
    ("--beside", opts.some_of(*BESIDE), None, f"beside fserver, some of {', '.join(BESIDE)}"),
    ("--rounds", opts.positive, 7, "number of rounds"),
    ("--seconds", opts.above_zero, 0.2, "approximate length of a round of each way"),
    ("--iters", opts.positive, None, "exchanges in a round, instead of --seconds"),
    ("--no-baseline", bool, False, "no raw baseline, which needs a C compiler"),
    *opts.TWO_HOSTS,
)


def main(argv: list[str]) -> int:
    options = _options(argv)
    several = {"device": options.device, "groups": options.groups}
    columns = [name for name, values in several.items() if values[1:]]
    columns += [*report.MEASURED, *report.RAW, *(OF_MODEL if options.layers > 1 else ())]
    apart = list(itertools.product(*several.values()))
    count = len(apart) * len(options.sizes) * len(options.ops)
    with Run("pingpong", options, columns) as run:
        run.table((rows for each in apart for rows in _cases(run, *each)), count)
        for key, (text, _) in report.PARTS.items() if options.layers > 1 and run.rows else ():
            print(f"{text:<50}", *(f"{row['parts_us'][key]:>9.1f} µs" for row in run.rows))
    return 0


def cases(options: argparse.Namespace, device: str = "cpu") -> list[Case]:
    """Each size, there and home, with every op, each under keys of its own. A push and an answer
    have as many tensors of that size as `tensors` says."""
    found, key = list[Case](), 0
    unit = options.layers * options.stages
    more = {"stages": options.stages, "unit": unit, "servers": options.servers, "device": device}
    for (out, back), op in itertools.product(options.sizes, options.ops):
        there = (SMALL if op == "pull" else out,) * options.tensors
        home = () if op == "push" else (back,) * options.tensors
        found.append(Case(op, there, home, key, **more))
        key += options.tensors * options.stages
    return found


def _options(argv: list[str]) -> argparse.Namespace:
    options = PARSER.parse_args(argv)
    opts.check_hosts(PARSER, options)
    several, on_cpu = options.groups != [1], options.device == ["cpu"]
    more = options.transport[1:] or options.workers * options.servers > 1 or options.shared
    if options.role and (more or several or options.beside or not on_cpu):
        PARSER.error("--role: want one --transport, worker and server, --device cpu, no --beside")
    if options.layers * options.stages > TRACES:
        PARSER.error(f"--layers x --stages: want at most {TRACES}")
    if options.shared and not on_cpu:
        PARSER.error("--shared: want --device cpu")
    if several and (options.beside or not on_cpu):
        PARSER.error("--groups: want --device cpu and no --beside")
    return options


def _cases(run: Run, device: str, groups: int) -> Iterator[list[dict[str, Any]]]:
    options = run.options
    planned = cases(options, device)
    with contextlib.ExitStack() as stack:
        ways = [*_ours(run, stack, planned[0], groups)]
        if players := [way for way in ways if way.player]:
            ways += _others(run, stack, players, planned)
        for case in planned:
            run.measure(ways, case)
            rows = []
            for way in ways if options.role != "server" else ():
                sent = way.player.all("sent")[0] if way in players else []
                row = {**way.row(case, groups), "device": device, "sent": sent}
                rows.append({**row, **(_of_model(way, case) if options.layers > 1 else {})})
            yield rows


def _of_model(way: Way, case: Case) -> dict[str, Any]:
    median, rounds = statistics.median, [one for one in way.rounds if "parts_us" in one]
    if not rounds:
        return dict.fromkeys((*OF_MODEL, "parts_us"))
    p50_us = median(one["p50_us"] for one in rounds)
    parts = {key: median(one["parts_us"][key] for one in rounds) for key in report.PARTS}
    found = p50_us / BUDGET_US, 1e6 / (case.unit * p50_us), median(r["step_ms"] for r in rounds)
    return {**dict(zip(OF_MODEL, found, strict=True)), "parts_us": parts}


def _ours(run: Run, stack: contextlib.ExitStack, case: Case, groups: int) -> Iterator[Way]:
    """A pair for each transport, and another one for shared tensors. They end with the stack."""
    options = run.options
    alone = len(options.transport) * len(options.device) == 1
    kinds = (False, True) if options.shared else (False,)
    for transport, shared in itertools.product(options.transport, kinds):
        way = Way(transport, spare=not alone)
        with way.tried():
            crew = _pair(run, stack, transport, case.device, groups)
            crew.shared = shared
            if case.device == "gpu":  # how that travels is known when it has
                crew.prepare(case)
                crew.check(0)
            name = transport if options.role == "server" else crew.transport()
            way = Way(f"{name} shared" if shared else name, crew, run.raw(name, crew.gpus))
        yield way


def _pair(run: Run, stack: contextlib.ExitStack, transport: str, device: str, groups: int) -> Crew:
    """Worker and server; of two hosts, the one of this host."""
    options = run.options
    if device == "gpu":
        need_gpu()
    both = members(run.cores, counts=(options.workers, options.servers), groups=groups)
    mine = [m for m in both if options.role in (None, m.role)]
    crew = stack.enter_context(Crew(mine))
    stack.enter_context(crew.cluster(transport, options.host, options.scheduler, device))
    return crew


def _others(
    run: Run, stack: contextlib.ExitStack, ours: Sequence[Way], planned: Sequence[Case]
) -> Iterator[Way]:
    """The other libraries, which end with the stack, and the programs of --beside."""
    raw, on_gpu = ours[0].raw, planned[0].device == "gpu"
    gpus = ours[0].player.gpus if on_gpu else None
    names = run.options.beside or (opts.ON_GPUS if on_gpu else ())
    if others := [name for name in names if name in LIBRARIES]:
        from . import libraries  # with torch, which takes seconds

        room = max(SMALL, *(max(case.moved) for case in planned))
        yield from libraries.beside(stack, others, raw, gpus, room, run.cores)
    if "shm" in names:
        yield run.program(Way("raw shm"), "raw shm")
    for way in ours if "c++" in names else ():
        if not way.player.shared:
            settings = settings_of(way.name.partition("/")[0], one_host=False)
            settings |= {"STEPMESH_BACKEND": "CPU", "FSERVER_LOG": "warn"}
            yield run.program(Way(f"{way.name} C++", raw=way.raw), "C++", (0, 0), **settings)
