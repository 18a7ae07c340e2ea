"""`fserver bench kv`: pushes and pulls of keys and values, as ps-lite's benchmark measures them.
Starts bench_kv.cc in all roles, and reads the lines of its log."""

import contextlib
import itertools
import os
import re
import statistics
import subprocess
import tempfile
import time
from typing import Any, NamedTuple

from fserver import env
from fserver.run import free_port
from fserver.run.gpus import seen

from . import options as opts
from .baseline import compiled
from .crew import OTHERS, settings_of
from .errors import BenchError
from .run import Run

ROLES = {  # by place; of two hosts by that of this host
    "local": ("scheduler", "server", "worker"),
    "joint": ("scheduler", "joint"),
    "server": ("scheduler", "server"),
    "worker": ("worker",),
}
PLACES = ("local", "joint")
MEMORY = ("cpu", "cpu:gpu", "gpu:cpu", "gpu")
TIMEOUT = 600.0  # seconds; one line of the table
# Variables, by how they begin.
REPLACED = (*OTHERS, *"TEST_NUM_GPU_ TOTAL_DURATION BENCHMARK_SIZE BENCHMARK_ITER".split())
LINE = re.compile(r"(worker \d+.*): \w+: Application goodput: ([\d.]+) Gbps, ([\d.]+) messages/s")
GOODPUT = ("goodput_gbps", "goodput_min", "goodput_max", "messages")
PARSER = opts.parser(
    "fserver bench kv",
    "Measures pushes and pulls of keys and values between C++ programs that use ps/ps.h, as "
    "ps-lite's benchmark does. The table shows the goodput of one direction in 10^9 bits per "
    "second: the median over the rounds, the slowest and the fastest round; workers are summed up. "
    "For two hosts, run the command on both, with the same options. Each line of the table uses "
    "the next port. docs/benchmarks.md says more.",
    opts.CORES,
    ("--places", opts.some_of(*PLACES), "local,joint", f"places, of {', '.join(PLACES)}"),
    ("--memory", opts.some_of(*MEMORY), "cpu", f"of workers:servers, of {', '.join(MEMORY)}"),
    ("--ops", opts.some_of(*opts.OPS), ",".join(opts.OPS), f"some of {', '.join(opts.OPS)}"),
    ("--transport", opts.listed(str), "auto", opts.TRANSPORTS),
    ("--sizes", opts.listed(opts.size), "4K,64K,1M", "bytes of a key"),
    ("--keys", opts.positive, 40, "keys at each server"),
    ("--workers", opts.positive, 1, "number of workers"),
    ("--servers", opts.positive, 1, "number of servers"),
    ("--rounds", opts.positive, 5, "number of rounds"),
    ("--iters", opts.positive, None, "how often a round sends all keys (default: 64 MiB in all)"),
    *opts.TWO_HOSTS,
)


class Case(NamedTuple):
    place: str
    memory: str
    transport: str
    op: str
    bytes: int


def main(argv: list[str]) -> int:
    options = PARSER.parse_args(argv)
    opts.check_hosts(PARSER, options)
    if options.role:
        options.places = ["remote"]
    if "joint" in options.places and options.workers != options.servers:
        PARSER.error("--places joint: want the same number of --workers and --servers")
    lists = options.places, options.memory, options.transport, options.ops, options.sizes
    planned = [Case(*each) for each in itertools.product(*lists)]
    with Run("kv", options, (*Case._fields, "keys", *GOODPUT)) as run:
        rows = (_row(run, at, case) for at, case in enumerate(planned))
        run.table(([] if options.role == "server" else [row] for row in rows), len(planned))
    return 0


def _row(run: Run, at: int, case: Case) -> dict[str, Any]:
    """Line `at` of the table; on the host of the server there is nothing in it."""
    options, reason = run.options, None
    iters = opts.exchanges(options, case.bytes * options.keys * options.servers)
    if options.role and case.transport in [w["name"] for w in env.transports() if w["inside"]]:
        reason = "it stays inside a host"
    if "gpu" in case.memory and not seen(os.environ):
        reason = "this host has no GPU that can be used (run `fserver doctor` for the reason)"
    log = "" if reason else _logged(run, case, iters, at)
    row = {**case._asdict(), "keys": options.keys, "iters": iters, "skipped": reason}
    return {**row, **figures(log)}


def _logged(run: Run, case: Case, iters: int, at: int) -> str:
    """Runs the processes of line `at`; returns what they have printed. Raises BenchError."""
    options, cores = run.options, run.cores
    count = str(options.rounds * iters)
    command = [str(compiled("bench_kv.cc")), str(case.bytes), count, case.op]
    counts = {"scheduler": 1, "server": options.servers}
    roles = ROLES[options.role or case.place]
    worker, server = (case.memory.split(":") * 2)[:2]
    memory = {"worker": worker, "server": server, "joint": case.memory}
    pinned: dict[str, tuple[int, ...]] = {"worker": cores[:1], "server": cores[1:]}
    with contextlib.ExitStack() as stack:
        where = options.scheduler or stack.enter_context(free_port(options.host or "127.0.0.1"))
        address, _, port = where.rpartition(":")
        variables = {
            "STEPMESH_BACKEND": "CPU",
            "DMLC_PS_ROOT_URI": address.strip("[]"),
            "DMLC_PS_ROOT_PORT": int(port) + (at if options.scheduler else 0),
            "DMLC_NUM_WORKER": options.workers,
            "DMLC_NUM_SERVER": options.servers,
            "NUM_KEY_PER_SERVER": options.keys,
            "LOG_DURATION": iters,
            "TEST_NUM_GPU_WORKER": int(worker == "gpu"),
            "TEST_NUM_GPU_SERVER": int(server == "gpu"),
            **settings_of(case.transport, one_host=not options.role),
            **({"DMLC_NODE_HOST": options.host} if options.host else {}),
        }
        given = {name: text for name, text in os.environ.items() if not name.startswith(REPLACED)}
        common = {**given, **{name: str(value) for name, value in variables.items()}}
        log = stack.enter_context(tempfile.TemporaryFile("a+"))
        processes: dict[str, subprocess.Popen[bytes]] = {}
        for role, rank in [(r, i) for r in roles for i in range(counts.get(r, options.workers))]:
            env = {**common, "DMLC_ROLE": role, "DMLC_NODE_RANK": str(rank)}
            if "gpu" in memory.get(role, ""):
                gpu = seen(os.environ) - 1 if role == "server" else 0
                env |= {"STEPMESH_BACKEND": "GPU", "STEPMESH_GPU": str(gpu)}
            pin = ["taskset", "-c", ",".join(map(str, pinned.get(role, cores)))]
            made = subprocess.Popen([*pin, *command], env=env, stdout=log, stderr=log)
            processes[f"{role} {rank}"] = stack.enter_context(made)
            stack.callback(made.kill)
        end, status = time.monotonic() + TIMEOUT, dict[str, int | None].fromkeys(processes)
        while None in status.values() and not any(status.values()) and time.monotonic() < end:
            time.sleep(0.01)
            status = {name: process.poll() for name, process in processes.items()}
        log.seek(0)
        text = log.read()
    if any(code != 0 for code in status.values()):
        raise BenchError(f"bench_kv failed; the statuses are {status}, and it printed: {text}")
    return text


def figures(log: str) -> dict[str, Any]:
    """The median, slowest and fastest round. Workers and threads are summed up."""
    rounds: dict[str, list[tuple[float, float]]] = {}
    for who, goodput, messages in LINE.findall(log):
        rounds.setdefault(who, []).append((float(goodput), float(messages)))

    def total(what: Any, column: int = 0) -> float | None:
        values = [what([line[column] for line in lines]) for lines in rounds.values()]
        return round(sum(values), 4) if values else None

    median, count = statistics.median, max(map(len, rounds.values()), default=0)
    found = total(median), total(min), total(max), total(median, 1)
    return {**dict(zip(GOODPUT, found, strict=True)), "rounds": count}
