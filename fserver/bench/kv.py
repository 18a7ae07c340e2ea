"""`fserver bench kv`: pushes and pulls of keys and values, as ps-lite's benchmark measures them.

bench_kv.cc is the program of all roles. This starts its processes, and reads the lines of its log.
"""

import argparse
import contextlib
import os
import re
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from fserver.run.gpus import seen

from . import report
from .cpp import compiled
from .crew import free_port, transport_settings
from .errors import BenchError
from .matrix import NO_ADDRESS, PLACES, own_address
from .options import SHOWN, choose_cores, one_of, parser, positive, sizes

OPS = ("push", "pull", "push_pull")
MEMORY = ("cpu", "cpu:gpu", "gpu:cpu", "gpu")
TRANSPORTS = "tcp, cma (inside a host), verbs, or auto (the best available)"
ROUND_BYTES = 64 << 20  # of a round, if --iters is not given
TIMEOUT = 600.0  # seconds; one line of the table
LINE = re.compile(
    r"(worker \d+(?:, thread \d+)?): \w+: Application goodput: ([\d.]+) Gbps, "
    r"([\d.]+) messages/s\. count = (\d+)"
)
COLUMNS = (
    report.Column("place", -6, "place", str),
    report.Column("memory", -7, "memory", str),
    report.TRANSPORT,
    report.OP,
    report.Column("keys", 6, "keys", str),
    report.Column("bytes", 8, "bytes", report.show_size),
    report.Column("Gbps", 9, "goodput_gbps", "{:.3f}".format),
    report.Column("min", 9, "goodput_min", "{:.3f}".format),
    report.Column("max", 9, "goodput_max", "{:.3f}".format),
    report.Column("messages/s", 11, "messages", "{:.0f}".format),
)


class Case(NamedTuple):
    """A line of the table."""

    place: str
    memory: str
    transport: str
    op: str
    size: int

    def on_gpu(self, role: str) -> bool:
        """Whether the values of workers, of servers are on a GPU."""
        worker, _, server = self.memory.partition(":")
        return (worker if role == "worker" else server or worker) == "gpu"


class Process(NamedTuple):
    """A process of a cluster, and what it has printed."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: IO[str]

    def text(self) -> str:
        """All of its output so far."""
        self.log.seek(0)
        return self.log.read()


def main(argv: list[str]) -> int:
    """Runs the benchmark; returns the exit status."""
    made = _parser()
    options = made.parse_args(argv)
    _check(made, options)
    cores = choose_cores(options.cores)
    facts = report.begin(options, cores)
    planned = cases(options)
    table, rows = report.Table(COLUMNS), []
    with contextlib.ExitStack() as stack:
        program = compiled(Path(stack.enter_context(tempfile.TemporaryDirectory())), "bench_kv.cc")
        if options.role != "server":
            print(table.header(), flush=True)
        bar = stack.enter_context(report.Progress(len(planned), "kv", "line"))
        for at, case in enumerate(planned):
            row = _measure(program, case, options, cores, at)
            if row:
                bar.print(table.line(row))
                rows.append(row)
            bar.step()
    report.finish(options, "kv", facts, rows)
    return 0


def cases(options: argparse.Namespace) -> list[Case]:
    """The lines of the table. A remote place has tcp alone, as matrix has."""
    return [
        Case(place, memory, transport, op, size)
        for place in options.places
        for memory in options.memory
        for transport in (["tcp"] if place == "remote" and not options.role else options.transport)
        for op in options.ops
        for size in options.sizes
    ]


def iterations(options: argparse.Namespace, case: Case) -> int:
    """How often a round sends all keys."""
    if options.iters:
        return int(options.iters)
    return min(max(ROUND_BYTES // (case.size * options.keys * options.servers), 10), 1000)


def _measure(
    program: Path,
    case: Case,
    options: argparse.Namespace,
    cores: tuple[int, int] | None,
    at: int,
) -> dict[str, Any] | None:
    """Runs a cluster; None at the host of the servers."""
    known = {
        "place": case.place,
        "memory": case.memory,
        "transport": case.transport,
        "op": case.op,
        "bytes": case.size,
        "keys": options.keys,
        "workers": options.workers,
        "servers": options.servers,
        "threads": options.threads,
        "iters": iterations(options, case),
    }
    host = options.host
    if case.place == "remote" and not options.role:
        host = own_address()
        if not host:
            return {**known, **figures({}), "skipped": NO_ADDRESS}
    with contextlib.ExitStack() as stack:
        where = host or "127.0.0.1"
        address = options.scheduler or stack.enter_context(free_port(where))
        name, _, port = address.rpartition(":")
        common = _environment(options, case)
        common["DMLC_PS_ROOT_URI"] = name.strip("[]")
        common["DMLC_PS_ROOT_PORT"] = str(int(port) + (at if options.scheduler else 0))
        if host:
            common["DMLC_NODE_HOST"] = host
        command = [str(program), str(case.size), str(options.rounds * known["iters"]), case.op]
        processes: list[Process] = []
        stack.callback(_end, processes)
        for process in members(options, case.place):
            processes.append(_start(command, common, process, case, cores, stack))
        text = _wait(processes)
    if options.role == "server":
        return None
    return {**known, **figures(lines(text)), "skipped": None}


def members(options: argparse.Namespace, place: str) -> list[tuple[str, int]]:
    """The processes of this host: role and rank of each."""
    servers = [("scheduler", 0), *(("server", i) for i in range(options.servers))]
    workers = [("worker", i) for i in range(options.workers)]
    if place == "joint":
        return [servers[0], *(("joint", i) for i in range(options.workers))]
    if options.role:
        return servers if options.role == "server" else workers
    return servers + workers


def _environment(options: argparse.Namespace, case: Case) -> dict[str, str]:
    """What all processes have in common."""
    own = ("DMLC_", "STEPMESH_", "BENCHMARK_", "TEST_NUM_GPU_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    env.pop("TOTAL_DURATION", None)
    env.update(transport_settings(case.transport))
    env.update(
        DMLC_NUM_WORKER=str(options.workers),
        DMLC_NUM_SERVER=str(options.servers),
        NUM_KEY_PER_SERVER=str(options.keys),
        LOG_DURATION=str(iterations(options, case)),
        BENCHMARK_NTHREAD=str(options.threads),
        ENABLE_RECV_BUFFER=str(int(options.registered)),
        TEST_NUM_GPU_WORKER=str(int(case.on_gpu("worker"))),
        TEST_NUM_GPU_SERVER=str(int(case.on_gpu("server"))),
    )
    if not options.role and not {"FSERVER_SECRET", "FSERVER_SECRET_FILE"} & set(env):
        env["FSERVER_SECRET"] = secrets.token_hex(16)
    return env


def _start(
    command: list[str],
    common: Mapping[str, str],
    member: tuple[str, int],
    case: Case,
    cores: tuple[int, int] | None,
    stack: contextlib.ExitStack,
) -> Process:
    role, rank = member
    env = {**common, "DMLC_ROLE": role, "DMLC_NODE_RANK": str(rank), "STEPMESH_BACKEND": "CPU"}
    if any(case.on_gpu(r) for r in ("worker", "server") if role in (r, "joint")):
        gpu = seen(common) - 1 if role == "server" else 0
        env.update(STEPMESH_BACKEND="GPU", STEPMESH_GPU=str(gpu))
    usable = {"worker": cores and cores[:1], "server": cores and cores[1:]}.get(role, cores)
    if usable and role != "scheduler":
        command = ["taskset", "-c", ",".join(map(str, usable)), *command]
    log = stack.enter_context(tempfile.TemporaryFile("w+"))
    try:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    except FileNotFoundError:
        raise BenchError(f"{command[0]}: not found (run apt-get install util-linux)") from None
    return Process(f"{role} {rank}", process, log)


def _wait(processes: list[Process]) -> str:
    """Waits for all processes; returns what they have printed.

    Raises:
        BenchError: one has failed, or they take too long.
    """
    end = time.monotonic() + TIMEOUT
    while any(p.process.poll() is None for p in processes):
        _raise_failed(processes)
        if time.monotonic() > end:
            names = ", ".join(p.name for p in processes if p.process.poll() is None)
            raise BenchError(f"bench_kv: {names} did not end within {TIMEOUT:g} s")
        time.sleep(0.01)
    _raise_failed(processes)
    return "\n".join(p.text() for p in processes)


def _raise_failed(processes: list[Process]) -> None:
    for p in processes:
        if p.process.poll():
            text = p.text().strip() or "it has printed nothing"
            raise BenchError(f"{p.name} ended with status {p.process.returncode}: {text}")


def _end(processes: list[Process]) -> None:
    """Ends those that still run."""
    for p in processes:
        if p.process.poll() is None:
            p.process.kill()
        p.process.wait()


def lines(text: str) -> dict[str, list[tuple[float, float]]]:
    """Goodput and messages of each line of the log, by who has written it."""
    found: dict[str, list[tuple[float, float]]] = {}
    for match in LINE.finditer(text):
        found.setdefault(match[1], []).append((float(match[2]), float(match[3])))
    return found


def figures(found: Mapping[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians over the rounds, and the slowest and the fastest one. Workers and threads are summed
    up."""
    result: dict[str, Any] = {"rounds": max(map(len, found.values()), default=0)}

    def total(column: int, what: Any) -> float | None:
        values = [what([line[column] for line in rounds]) for rounds in found.values()]
        return round(sum(values), 4) if values else None

    result["goodput_gbps"] = total(0, statistics.median)
    result["goodput_min"] = total(0, min)
    result["goodput_max"] = total(0, max)
    result["messages"] = total(1, statistics.median)
    return result


def _check(made: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if bool(options.scheduler) != bool(options.role):
        made.error(
            "--scheduler and --role: give both, or neither (run one command on each of two hosts)"
        )
    if options.scheduler and not re.fullmatch(r".+:\d{1,5}", options.scheduler):
        made.error(f"--scheduler {options.scheduler}: want HOST:PORT")
    if options.role:
        options.places = ["remote"]
    if "joint" in options.places and options.workers != options.servers:
        made.error(
            f"--places joint: --workers {options.workers} and --servers {options.servers} differ, "
            "but each process is a worker and a server: give the same number"
        )
    if any("gpu" in memory for memory in options.memory) and seen(os.environ) == 0:
        raise BenchError(
            f"--memory {','.join(options.memory)}: this host has no GPU that can be used (run "
            "`fserver doctor` for the reason, or give --memory cpu)"
        )


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "kv",
        "Measures pushes and pulls of keys and values between C++ programs that use ps/ps.h, as "
        "ps-lite's benchmark does. Each key has a request of its own. A round sends requests for "
        "all keys some number of times, and waits for them each time. The table shows the median "
        "goodput over the rounds, in 10^9 bits per second of one direction, the slowest and the "
        "fastest round, and the messages per second; workers are summed up. Before and after the "
        "rounds, all bytes are pushed, pulled and compared. There are three places, as in "
        "`fserver bench matrix`: local, remote (over TCP, through an address of this host that is "
        "not loopback, or between two hosts), and joint (each process is a worker and a server). "
        "For two hosts, run the command on both, with the same options, --role, and --scheduler "
        "HOST:PORT, an address of the servers' host. Each line of the table uses the next port.",
        seconds=None,
        transport=None,
    )
    add = made.add_argument
    for name, allowed, default in (
        ("places", PLACES, "local,joint"),
        ("memory", MEMORY, "cpu"),
        ("ops", OPS, ",".join(OPS)),
    ):
        text = f"{name}, of {', '.join(allowed)} {SHOWN}"
        if name == "memory":
            text = f"where values are, at the workers and at the servers: {text}"
        add(f"--{name}", type=one_of(allowed), default=default, metavar="LIST", help=text)
    transports = f"transports: {TRANSPORTS} {SHOWN}"
    add("--transport", type=_words, default="tcp,cma", metavar="LIST", help=transports)
    add("--sizes", type=sizes, default="4K,64K,1M", metavar="LIST", help=f"bytes a key {SHOWN}")
    add("--keys", type=positive, default=40, help=f"keys at each server {SHOWN}")
    add("--workers", type=positive, default=1, help=f"number of workers {SHOWN}")
    add("--servers", type=positive, default=1, help=f"number of servers {SHOWN}")
    add("--threads", type=positive, default=1, help=f"threads of a worker {SHOWN}")
    add("--rounds", type=positive, default=5, help=f"number of rounds {SHOWN}")
    text = "send all keys N times in a round (default: as often as makes 64 MiB, 10 to 1,000 times)"
    add("--iters", type=positive, metavar="N", help=text)
    text = "servers receive pushes in registered memory (RegisterRecvBuffer)"
    add("--registered", action="store_true", help=text)
    add("--scheduler", metavar="HOST:PORT", help="two hosts: an address of the servers' host")
    add("--role", choices=("worker", "server"), help="two hosts: the role of this host")
    add("--host", metavar="ADDRESS", help="two hosts: the address of this host to use")
    return made


def _words(text: str) -> list[str]:
    return text.split(",")
