"""`fserver bench cpp`: the C++ interface, in turn with Python's and with the same copies in C."""

import os
import subprocess
from pathlib import Path

from fserver import config

from .baseline import SOURCES, Baseline
from .errors import BenchError


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
