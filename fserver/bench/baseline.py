"""The raw baselines: programs in C, compiled at first use, driven over standard input (raw.h)."""

import functools
import json
import os
import select
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from fserver import config

from .crew import Case
from .errors import BenchError

SOURCES = Path(__file__).resolve().parent
INCLUDE, LIB = config.HOME / "include", config.HOME / "lib"
TIMEOUT = 600.0  # seconds; a round
SMALL = 64  # bytes that answer a push of a program or a library

WAYS = {  # how bytes travel, as rows name it: the program, and its last argument
    "raw tcp": ("rawecho.c", None),
    "raw cma": ("rawcma.c", "cma"),
    "raw shm": ("rawcma.c", "shm"),
    "raw gpu": ("rawgpu.c", "{},{}"),
    "C++": ("cppecho.cc", None),
}
OF_TRANSPORT = {"tcp": "raw tcp", "cma": "raw cma", "cudaipc": "raw gpu"}
CXX = ["c++", "-std=c++17", "-O2", f"-I{INCLUDE}"]
LINKED = [f"-L{LIB}", f"-Wl,-rpath,{LIB}", "-lfserver", "-pthread", "-ldl"]
LANGUAGES = {  # by suffix: the compiler, libraries, and what to do where there is no compiler
    "c": ("CC", ["cc", "-O2"], ["-ldl"], "a C compiler (run apt-get install gcc)"),
    "cc": ("CXX", CXX, LINKED, "a C++ compiler (run apt-get install g++)"),
    "cu": ("NVCC", ["nvcc", "-O3", "-arch=native"], ["-lcuda"], "nvcc of CUDA (or set NVCC)"),
}


class Baseline:
    """The two processes of a way, which its program starts with these variables in its environment;
    "raw gpu" is between the GPUs. They use no CPU between rounds."""

    unit = 1  # round trips that are counted as one

    def __init__(
        self, way: str, cores: tuple[int, int], gpus: tuple[int, int] = (0, 0), **variables: str
    ):
        self.way, self._moved, pipe = way, (0, 0), subprocess.PIPE
        source, last = WAYS[way]
        command = [str(compiled(source)), *map(str, cores), *([last.format(*gpus)] if last else [])]
        pipes: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": pipe}
        env = {**os.environ, **variables}
        self._process = subprocess.Popen(command, text=True, bufsize=1, env=env, **pipes)

    def __enter__(self) -> "Baseline":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def prepare(self, case: Case) -> None:
        """The bytes there and home of the next rounds; a push is answered too."""
        self._moved = case.moved[0], case.moved[1] or SMALL

    def check(self, seed: int) -> None:
        """Nothing: each message carries its number, which both ends compare."""

    def measure(self, warmup: int, count: int) -> dict[str, Any]:
        """One round; figures in microseconds."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(f"{self._moved[0]} {self._moved[1]} {warmup} {count}\n")
            if not select.select([stdout], [], [], TIMEOUT)[0]:
                raise BenchError(f"the baseline {self.way} did not answer within {TIMEOUT:g} s")
            text = stdout.readline()
        except BrokenPipeError:
            text = ""
        if not text:
            errors = self._process.communicate()[1].strip()
            status = self._process.returncode
            raise BenchError(f"the baseline {self.way} ended with status {status}: {errors}")
        return dict(json.loads(text))


@functools.cache
def _scratch() -> "tempfile.TemporaryDirectory[str]":
    """A folder that goes with this process."""
    return tempfile.TemporaryDirectory(prefix="fserver-bench-")


@functools.cache
def compiled(source: str) -> Path:
    """Compiles a source beside this file, once in this process. Raises BenchError if it cannot."""
    program, _, language = source.partition(".")
    variable, (usual, *options), libraries, needs = LANGUAGES[language]
    made = Path(_scratch().name) / program
    compiler = os.environ.get(variable, usual)
    command = [compiler, *options, str(SOURCES / source), "-o", str(made), *libraries]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise BenchError(f"{compiler}: not found: {source} needs {needs}") from None
    except subprocess.CalledProcessError as error:
        raise BenchError(f"cannot compile {source}:\n{error.stderr}") from None
    return made
