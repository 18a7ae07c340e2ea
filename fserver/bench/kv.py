"""`fserver bench kv`: pushes and pulls of keys and values, as ps-lite's benchmark measures them.

bench_kv.cc is the program of all roles. This starts its processes, and reads the lines of its log.
"""

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from fserver.run.gpus import seen

from . import options as opts
from . import report
from .baseline import compiled
from .errors import BenchError
from .host import NO_ADDRESS, OTHERS, free_port, own_address, secret, transport_settings
from .run import Run

OPS = ("push", "pull", "push_pull")
MEMORY = ("cpu", "cpu:gpu", "gpu:cpu", "gpu")
ROUND_BYTES = 64 << 20  # of a round, if --iters is not given
TIMEOUT = 600.0  # seconds; one line of the table
NO_GPU = "this host has no GPU that can be used (run `fserver doctor` for the reason)"
LINE = re.compile(r"(worker \d+.*): \w+: Application goodput: ([\d.]+) Gbps, ([\d.]+) messages/s")
COLUMNS = (
    report.Column("place", -6, "place"),
    report.Column("memory", -7, "memory"),
    report.TRANSPORT,
    report.OP,
    report.Column("keys", 6, "keys"),
    report.Column("bytes", 8, "bytes", report.show_size),
    report.number("Gbps", 9, "goodput_gbps", 3),
    report.number("min", 9, "goodput_min", 3),
    report.number("max", 9, "goodput_max", 3),
    report.number("messages/s", 11, "messages", 0),
)
PARSER = opts.parser(
    "kv",
    "Measures pushes and pulls of keys and values between C++ programs that use ps/ps.h, as "
    "ps-lite's benchmark does. The table shows the median goodput over the rounds, in 10^9 bits "
    "per second of one direction, the slowest and the fastest round, and the messages per second; "
    "workers are summed up. docs/benchmarks.md describes it. For two hosts, run the command on "
    "both, with the same options. Each line of the table uses the next port.",
    ("--places", opts.some_of(opts.PLACES), "local,joint", f"places, of {', '.join(opts.PLACES)}"),
    ("--memory", opts.some_of(MEMORY), "cpu", "at the workers:servers, of " + ", ".join(MEMORY)),
    ("--ops", opts.some_of(OPS), ",".join(OPS), f"operations, of {', '.join(OPS)}"),
    ("--transport", opts.names, "tcp,cma", "transports: tcp, cma (inside a host), verbs, or auto"),
    ("--sizes", opts.sizes, "4K,64K,1M", "bytes of a key"),
    ("--keys", opts.positive, 40, "keys at each server"),
    ("--workers", opts.positive, 1, "number of workers"),
    ("--servers", opts.positive, 1, "number of servers"),
    ("--threads", opts.positive, 1, "threads of a worker"),
    ("--rounds", opts.positive, 5, "number of rounds"),
    ("--iters", opts.positive, None, "how often a round sends all keys (default: 64 MiB in all)"),
    ("--registered", bool, False, "servers receive pushes in registered memory"),
    *opts.TWO_HOSTS,
)


class Case(NamedTuple):
    """A line of the table."""

    place: str
    memory: str
    transport: str
    op: str
    bytes: int

    def on_gpu(self, role: str) -> bool:
        """Whether the values of a process of that role are on a GPU."""
        worker, _, server = self.memory.partition(":")
        where = {"worker": worker, "server": server or worker, "joint": self.memory}
        return "gpu" in where.get(role, "")


def main(argv: list[str]) -> int:
    """Runs the benchmark; returns the exit status."""
    options = PARSER.parse_args(argv)
    opts.check_hosts(PARSER, options)
    if options.role:
        options.places = ["remote"]
    if "joint" in options.places and options.workers != options.servers:
        PARSER.error("--places joint: want the same number of --workers and --servers")
    planned = cases(options)
    with Run("kv", options, columns=COLUMNS, steps=len(planned)) as run:
        program = compiled("bench_kv.cc")
        if options.role != "server":
            run.header()
        for at, case in enumerate(planned):
            row = _measured(program, case, run, at)
            if options.role != "server":
                run.add(row)
            run.step()
        run.finish()
    return 0


def cases(options: argparse.Namespace) -> list[Case]:
    """The lines of the table. On one host, a remote place has tcp alone."""
    return [
        Case(place, memory, transport, op, size)
        for place in options.places
        for memory in options.memory
        for transport in (["tcp"] if place == "remote" and not options.role else options.transport)
        for op in options.ops
        for size in options.sizes
    ]


def _measured(program: Path, case: Case, run: Run, at: int) -> dict[str, Any]:
    """Runs a cluster. `at`: the number of the line."""
    options, host = run.options, run.options.host
    count = ROUND_BYTES // (case.bytes * options.keys * options.servers)
    iters = options.iters or min(max(count, 10), 1000)
    row = {**case._asdict(), "iters": iters, "skipped": None}
    row |= {name: getattr(options, name) for name in ("keys", "workers", "servers", "threads")}
    if case.place == "remote" and not options.role:
        host = own_address()
        if not host:
            return {**row, **figures(""), "skipped": NO_ADDRESS}
    if "gpu" in case.memory and not seen(os.environ):
        return {**row, **figures(""), "skipped": NO_GPU}
    with contextlib.ExitStack() as stack:
        where = options.scheduler or stack.enter_context(free_port(host or "127.0.0.1"))
        address, _, port = where.rpartition(":")
        common = _environment(options, case)
        common["LOG_DURATION"] = str(iters)
        common["DMLC_PS_ROOT_URI"] = address.strip("[]")
        common["DMLC_PS_ROOT_PORT"] = str(int(port) + (at if options.scheduler else 0))
        if host:
            common["DMLC_NODE_HOST"] = host
        command = [str(program), str(case.bytes), str(options.rounds * iters), case.op]
        log = stack.enter_context(tempfile.TemporaryFile("a+"))
        processes = {}
        for role, rank in members(options, case.place):
            env = common | {"DMLC_ROLE": role, "DMLC_NODE_RANK": str(rank)}
            if case.on_gpu(role):
                gpu = seen(common) - 1 if role == "server" else 0
                env |= {"STEPMESH_BACKEND": "GPU", "STEPMESH_GPU": str(gpu)}
            made = subprocess.Popen(
                [*_pinned(role, run.cores), *command], env=env, stdout=log, stderr=log
            )
            processes[f"{role} {rank}"] = stack.enter_context(made)
            stack.callback(made.kill)
        return {**row, **figures(_output(processes, log))}


def members(options: argparse.Namespace, place: str) -> list[tuple[str, int]]:
    """The processes of this host: role and rank of each."""
    counts = {"scheduler": 1, "server": options.servers, "worker": options.workers}
    if place == "joint":
        counts = {"scheduler": 1, "joint": options.workers}
    elif options.role == "worker":
        counts = {"worker": options.workers}
    elif options.role == "server":
        del counts["worker"]
    return [(role, rank) for role, count in counts.items() for rank in range(count)]


def _environment(options: argparse.Namespace, case: Case) -> dict[str, str]:
    """What all processes have in common."""
    own = (*OTHERS, "BENCHMARK_", "TEST_NUM_GPU_", "TOTAL_DURATION")
    numbers = {
        "DMLC_NUM_WORKER": options.workers,
        "DMLC_NUM_SERVER": options.servers,
        "NUM_KEY_PER_SERVER": options.keys,
        "BENCHMARK_NTHREAD": options.threads,
        "ENABLE_RECV_BUFFER": int(options.registered),
        "TEST_NUM_GPU_WORKER": int(case.on_gpu("worker")),
        "TEST_NUM_GPU_SERVER": int(case.on_gpu("server")),
    }
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(own)},
        **transport_settings(case.transport),
        **{name: str(value) for name, value in numbers.items()},
        **({} if options.role else secret()),
        "STEPMESH_BACKEND": "CPU",
    }


def _pinned(role: str, cores: tuple[int, int] | None) -> list[str]:
    """What a command begins with, for the cores of a role."""
    own = {"worker": cores and cores[:1], "server": cores and cores[1:], "joint": cores}.get(role)
    return ["taskset", "-c", ",".join(str(core) for core in own)] if own else []


def _output(processes: Mapping[str, "subprocess.Popen[bytes]"], log: IO[str]) -> str:
    """Waits for all processes; returns what they have printed.

    Raises:
        BenchError: one has failed, or they take too long.
    """
    end = time.monotonic() + TIMEOUT
    while True:
        status = {name: process.poll() for name, process in processes.items()}
        bad = [f"{name} ended with status {code}" for name, code in status.items() if code]
        running = [name for name, code in status.items() if code is None]
        if running and time.monotonic() > end:
            bad = [f"{name} did not end within {TIMEOUT:g} s" for name in running]
        if bad or not running:
            log.seek(0)
            text = log.read()
            if bad:
                raise BenchError(f"bench_kv: {', '.join(bad)}: {text}")
            return text
        time.sleep(0.01)


def figures(log: str) -> dict[str, Any]:
    """Medians over the rounds, and the slowest and the fastest one. Workers and threads are summed
    up."""
    found: dict[str, list[tuple[float, float]]] = {}
    for who, goodput, messages in LINE.findall(log):
        found.setdefault(who, []).append((float(goodput), float(messages)))

    def total(column: int, what: Any) -> float | None:
        values = [what([line[column] for line in rounds]) for rounds in found.values()]
        return round(sum(values), 4) if values else None

    return {
        "rounds": max(map(len, found.values()), default=0),
        "goodput_gbps": total(0, statistics.median),
        "goodput_min": total(0, min),
        "goodput_max": total(0, max),
        "messages": total(1, statistics.median),
    }
