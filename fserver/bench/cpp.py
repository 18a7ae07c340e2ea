"""`fserver bench cpp`: the C++ interface, in turn with Python's and with the same copies in C."""

import argparse
import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

from fserver import config

from . import report
from .baseline import OF_TRANSPORT, SOURCES, Baseline
from .crew import Nodes, pair
from .errors import BenchError
from .options import CHECKED, choose_cores, open_baseline, parser, sizes
from .pingpong import cases
from .turns import CrewPlayer, Player, take_turns

SIZES = "64,4K,64K,1M"


def main(argv: list[str], nodes: Nodes = Nodes()) -> int:  # noqa: B008 (immutable)
    """Runs the benchmark; returns the exit status."""
    options = _parser().parse_args(argv)
    cores = choose_cores(options.cores)
    facts = report.begin(options, cores)
    table, rows = report.Table(), []
    print(table.header(), flush=True)
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(report.Progress(len(options.sizes) * options.rounds, "cpp"))
        crew = stack.enter_context(pair(nodes, options.transport, cores))
        python = CrewPlayer(crew)
        transport = "+".join(crew.workers("links")[0])
        raw, says = open_baseline(stack, options, OF_TRANSPORT.get(transport), cores)
        program = compiled(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        cpp = stack.enter_context(Program(program, options.transport, cores))
        for case in cases([(n, n) for n in options.sizes], ["push_pull"]):
            (out,), (back,) = case.out, case.back
            python.prepare(case)
            for one in filter(None, (raw, cpp)):
                one.prepare(out, back)
            players: list[Player] = [cpp, python, *([raw] if raw else [])]
            found = take_turns(
                players, options.rounds, options.seconds, options.iters, done=bar.step
            )
            baseline = found[2] if raw else []
            for name, figures in (("C++", found[0]), ("Python", found[1])):
                way = f"{transport} {name}"
                row = report.row(way, "push_pull", out, back, figures, baseline, **says)
                bar.print(table.line(row))
                rows.append(row)
    report.finish(options, "cpp", facts, rows)
    return 0


class Program(Baseline):
    """cppecho.cc: a worker and a server in C++, which are driven as a baseline is."""

    def __init__(self, program: Path, transport: str, cores: tuple[int, int] | None):
        worker, server = cores or (-1, -1)
        command = [f"FSERVER_TRANSPORT={transport}", "FSERVER_LOG=warn", str(program)]
        self._start("C++", ["env", *command, str(worker), str(server)])


def compiled(folder: Path, source: str = "cppecho.cc") -> Path:
    """Compiles a program that uses the C++ headers into a folder.

    Args:
        folder: where the program is put.
        source: beside this file.

    Raises:
        BenchError: there is no compiler, it failed, or the libraries are not there.
    """
    program = folder / Path(source).stem
    lib = config.HOME / "lib"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", f"-I{config.HOME / 'include'}"]
    command += [str(SOURCES / source), "-o", str(program), f"-L{lib}", f"-Wl,-rpath,{lib}"]
    try:
        subprocess.run(
            [*command, "-lfserver", "-pthread", "-ldl"], check=True, capture_output=True, text=True
        )
    except FileNotFoundError:
        raise BenchError(f"{command[0]}: not found (run apt-get install g++)") from None
    except subprocess.CalledProcessError as error:
        raise BenchError(f"cannot compile {source}:\n{error.stderr}") from None
    return program


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "cpp",
        "Measures push_pull and wait between two processes in C++ (fserver/fserver.hpp), in turn "
        "with two in Python and with a program in C that makes the same copies, all on the same "
        f"two cores. {CHECKED}",
        seconds=(0.2, "approximate length of a round"),
        rounds=9,
    )
    made.add_argument(
        "--sizes",
        type=sizes,
        default=SIZES,
        metavar="LIST",
        help=f"sizes in bytes, in each direction (default {SIZES})",
    )
    return made
