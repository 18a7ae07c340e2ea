"""`fserver run`: starts the roles of this host. See --help."""

import argparse
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator

from .gpus import MAX_GPU, deal, seen, told
from .roles import MAX_GROUP_SIZE, MAX_GROUPS, MAX_PROCESSES, Layout, Process, plan
from .supervisor import Supervisor

USAGE = """\
fserver run [options] SCRIPT [ARGS...]            a Python script for both roles
       fserver run [options] -m MODULE [ARGS...]         a Python module
       fserver run [options] -- PROGRAM [ARGS...]        any program
       fserver run [options] --worker-script W.py --server-script S.py [-- ARGS...]"""

EPILOG = f"""\
Environment: the launcher sets these variables for each process: DMLC_ROLE,
DMLC_NUM_WORKER, DMLC_NUM_SERVER, DMLC_GROUP_SIZE, DMLC_NODE_RANK (the group),
STEPMESH_GPU (the GPU), DMLC_RANK_OFFSET (makes the rank independent of the GPU), and
DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT (the address of the scheduler). On one host, the
launcher chooses a free port for the scheduler and a random secret for the cluster.
--scheduler, FSERVER_SECRET and FSERVER_SECRET_FILE override these.

GPUs: the launcher assigns the GPUs of the host in turn, first to the workers, then to
the servers. If there are enough GPUs, no two processes share one. --worker-gpus and
--server-gpus choose the GPUs of a role. If only one of the two is given, the other role
gets the remaining GPUs. If STEPMESH_GPU is set, the first process of each group uses
that GPU, and the other processes of the group use the next ones. The launcher prints
the assignment on standard error. Without GPUs, or with STEPMESH_BACKEND=CPU,
STEPMESH_GPU is the index of the process in its group.

Several hosts: run the same command on each host, with --node-rank 0, 1, ... The
scheduler runs on host 0. The list of all groups, workers first, is divided into equal
parts, one for each host. --dry-run shows the result.

End of a run: if a process fails, the launcher ends all processes and exits with the
status of the failed one (128 + n for signal n). It prints that process and its error
first, then what it ends, and at last how the other processes ended. It leaves out the
tracebacks of processes that failed because they lost a peer, that raised the same error,
or that Ctrl-C interrupted: it prints their last line and the place in your program. The
launcher forwards SIGINT, SIGTERM and SIGHUP to the workers and servers. After the last
worker has ended successfully, the launcher ends the servers that are still running. In a
run over several hosts it waits for them. If SIGKILL ends the launcher, the kernel ends its
processes, but not what these have started.

Limits: {MAX_GROUPS} groups of a role, {MAX_GROUP_SIZE} processes in a group, and
{MAX_PROCESSES} workers and servers in total."""


def main(argv: list[str]) -> int:
    """Runs the roles of this host to their end; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    layout = _layout(parser, options)
    commands = _commands(parser, options)
    with _scheduler(parser, options) as scheduler:
        dealt = deal(layout, _named(options), _base(parser), seen(os.environ))
        common = {**_common(options), **_port(layout)}
        processes = plan(layout, scheduler, commands, common, dealt)
        if not processes:
            parser.error(
                f"--nnodes {layout.hosts}: there are only {layout.workers + layout.servers} "
                f"groups, so host {layout.host} has no process (use fewer hosts or more groups)"
            )
        if dealt:
            print(f"fserver run: {told(dealt)}", file=sys.stderr, flush=True)
        if options.dry_run:
            print(*processes, sep="\n")
            return 0
        return Supervisor(processes, options.grace, layout.hosts > 1).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fserver run",
        usage=USAGE,
        description="Starts the scheduler, servers and workers of this host and waits for them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    groups, size = count(MAX_GROUPS), count(MAX_GROUP_SIZE)
    add(
        "--workers", type=groups, default=1, metavar="N", help="number of worker groups (default 1)"
    )
    add(
        "--servers", type=groups, default=1, metavar="N", help="number of server groups (default 1)"
    )
    add("--group-size", type=size, default=1, metavar="N", help="processes per group (default 1)")
    add(
        "--nnodes",
        type=count(MAX_PROCESSES),
        default=1,
        metavar="N",
        help="number of hosts (default 1)",
    )
    add("--node-rank", type=int, default=0, metavar="R", help="index of this host, from 0")
    for role in ("worker", "server"):
        add(
            f"--{role}-gpus",
            type=_gpus,
            metavar="LIST",
            help=f"GPUs for the {role}s of each host, for example 0,1 or 0-3",
        )
    add(
        "--scheduler",
        type=address,
        metavar="HOST:PORT",
        help="address on which the scheduler listens",
    )
    add("--worker-script", metavar="W.py", help="script that the workers run")
    add("--server-script", metavar="S.py", help="script that the servers run")
    add("-m", "--module", action="store_true", help="the scripts are names of Python modules")
    add("--no-python", action="store_true", help="the scripts are programs, run without Python")
    add(
        "--grace",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="time that processes have to end after a signal, and that servers have to end after "
        "the last worker (default 5)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print the commands and their environment, but run nothing",
    )
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _layout(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Layout:
    if not 0 <= options.node_rank < options.nnodes:
        parser.error(
            f"--node-rank {options.node_rank}: want 0 to {options.nnodes - 1}, "
            f"because --nnodes is {options.nnodes}"
        )
    processes = (options.workers + options.servers) * options.group_size
    if processes > MAX_PROCESSES:
        parser.error(
            f"--workers {options.workers} --servers {options.servers} "
            f"--group-size {options.group_size}: {processes} processes, but a cluster has at "
            f"most {MAX_PROCESSES} (use fewer or smaller groups)"
        )
    if options.nnodes > 1 and options.scheduler is None:
        parser.error(
            f"--nnodes {options.nnodes}: several hosts need --scheduler HOST:PORT "
            "(give an address of host 0)"
        )
    return Layout(
        options.workers, options.servers, options.group_size, options.nnodes, options.node_rank
    )


def _named(options: argparse.Namespace) -> dict[str, list[int]]:
    """The GPUs that options name, by role."""
    lists = {"worker": options.worker_gpus, "server": options.server_gpus}
    return {role: gpus for role, gpus in lists.items() if gpus}


def _base(parser: argparse.ArgumentParser) -> int | None:
    """The GPU that the user's own environment names."""
    text = os.environ.get("STEPMESH_GPU", "").strip()
    if text and not (text.isdecimal() and len(text) < 5 and int(text) <= MAX_GPU):
        parser.error(f"STEPMESH_GPU={text[:100]!r}: want a whole number from 0 to {MAX_GPU}")
    return int(text) if text else None


def _commands(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> dict[str, tuple[str, ...]]:
    """Command line of each role."""
    program, args = options.no_python, options.command
    scripts = {"worker": options.worker_script, "server": options.server_script}
    if any(scripts.values()):
        if not all(scripts.values()):
            parser.error("--worker-script and --server-script: give both, or neither")
        if args and args[0] != "--":
            parser.error(
                f"{args[0]}: unexpected argument (with --worker-script, put the arguments of both "
                "scripts after --)"
            )
        args = args[1:]
    else:
        if args and args[0] == "--":
            program, args = True, args[1:]
        if not args:
            parser.error("no command given: want SCRIPT, -m MODULE, or -- PROGRAM")
        scripts, args = dict.fromkeys(scripts, args[0]), args[1:]
    if program and options.module:
        parser.error(
            "-m cannot be combined with --no-python or --, because it names a Python module"
        )
    if program:
        prefix: tuple[str, ...] = ()
    elif options.module:
        prefix = (sys.executable, "-m")
    else:
        prefix = (sys.executable,)
        for script in scripts.values():
            if not os.path.exists(script):
                parser.error(
                    f"{script}: no such file (want a Python script, -m MODULE, or -- PROGRAM)"
                )
    return {role: (*prefix, script, *args) for role, script in scripts.items()}


@contextlib.contextmanager
def _scheduler(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> Iterator[tuple[str, int | str]]:
    """Host and port of the scheduler."""
    if options.scheduler is not None:
        yield options.scheduler
    elif options.dry_run:
        yield "127.0.0.1", "<free>"
    else:
        with free_port("127.0.0.1") as at:
            yield address(at)


@contextlib.contextmanager
def free_port(host: str) -> Iterator[str]:
    """HOST:PORT of a scheduler on this host, with a port that no other process gets meanwhile.

    A socket that is bound but does not listen keeps the port: the kernel gives
    it to nobody who asks for a free one, and the scheduler, which asks for this
    one and sets SO_REUSEADDR as this socket does, can listen there.
    """
    six = ":" in host
    with socket.socket(socket.AF_INET6 if six else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield f"{f'[{host}]' if six else host}:{holder.getsockname()[1]}"


def _common(options: argparse.Namespace) -> dict[str, str]:
    """Settings that every process of the run gets."""
    common = {}
    if options.scheduler is None:
        common["DMLC_LOCAL"] = "1"
        if not os.environ.get("FSERVER_SECRET") and not os.environ.get("FSERVER_SECRET_FILE"):
            common["FSERVER_SECRET"] = "<random>" if options.dry_run else secrets.token_hex(16)
    if "PYTHONUNBUFFERED" not in os.environ:
        common["PYTHONUNBUFFERED"] = "1"
    return common


def _port(layout: Layout) -> dict[str, str]:
    """Takes DMLC_PORT of the environment away from several servers, and says so."""
    port = os.environ.get("DMLC_PORT", "").strip()
    servers = sum(role == "server" for role, _ in layout.groups()) * layout.group_size
    if servers < 2 or port in ("", "0"):
        return {}
    print(
        f"fserver run: DMLC_PORT={port[:100]} has no effect: the {servers} servers of this host "
        "cannot share a port, so each has a free one",
        file=sys.stderr,
        flush=True,
    )
    return {"DMLC_PORT": ""}


def count(most: int = sys.maxsize) -> Callable[[str], int]:
    """The type of an argument that is a number of things, at least one."""

    def parse(text: str) -> int:
        # No longer ones: int refuses 5000 digits in words of its own.
        value = int(text) if text.isdecimal() and len(text) < 20 else 0
        if not 1 <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:100]!r}: want a whole number from 1 to {most}"
            )
        return value

    return parse


def _gpus(text: str) -> list[int]:
    """The type of a list of GPUs."""
    gpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end.isdecimal() and len(end) < 5 and int(end) <= MAX_GPU for end in ends):
            raise argparse.ArgumentTypeError(
                f"{text[:100]!r}: want GPU numbers from 0 to {MAX_GPU}, for example 0,1 or 0-3"
            )
        gpus += range(int(ends[0]), int(ends[1]) + 1)
    if not gpus:
        raise argparse.ArgumentTypeError(f"{text[:100]!r}: the list is empty (want FIRST-LAST)")
    return gpus


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: want a number of seconds, 0 or more")
    return value


def address(text: str) -> tuple[str, int]:
    """An argument that is an address, with or without the brackets of IPv6."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r}: want HOST:PORT, with a port from 1 to 65535")
    return host.strip("[]"), int(port)


__all__ = ["MAX_GROUPS", "Process", "address", "count", "free_port", "main"]
