"""The raw baselines: the programs in C beside this file, compiled when they are first used and
driven over their standard input (raw.h says how)."""

import hashlib
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fserver import config

from .errors import BenchError

SOURCES = Path(__file__).resolve().parent
INCLUDE, LIB = config.HOME / "include", config.HOME / "lib"
TIMEOUT = 600.0  # seconds; a round

WAYS = {  # how bytes travel, as rows name it: the program, and its last argument
    "raw tcp": ("rawecho", None),
    "raw cma": ("rawcma", "cma"),
    "raw shm": ("rawcma", "shm"),
    "raw gpu": ("rawgpu", None),
}
OF_TRANSPORT = {"tcp": "raw tcp", "cma": "raw cma", "cudaipc": "raw gpu"}
CXX = ["c++", "-std=c++17", "-O2", f"-I{INCLUDE}"]
LINKED = [f"-L{LIB}", f"-Wl,-rpath,{LIB}", "-lfserver", "-pthread", "-ldl"]
LANGUAGES = {  # by suffix: the compiler, libraries, and what to do where there is no compiler
    "c": ("CC", ["cc", "-O2"], ["-ldl"], "a C compiler (run apt-get install gcc)"),
    "cc": ("CXX", CXX, LINKED, "a C++ compiler (run apt-get install g++)"),
    "cu": ("NVCC", ["nvcc"], ["-lcuda"], "nvcc of the CUDA toolkit (set NVCC to its path)"),
}


def baseline_of(transport: str) -> str | None:
    """The baseline of a link, as Node.links() names it: "cma/staged" has that of "cma"."""
    return OF_TRANSPORT.get(transport.partition("/")[0])


def program(way: str, cores: tuple[int, int] | None = None, where: str | None = None) -> "Baseline":
    """Starts the program of a way. `where` is the address of this host (raw tcp; default 127.0.0.1)
    or the numbers of two GPUs (raw gpu), "0,1"."""
    source, last = WAYS[way]
    ends = [str(core) for core in cores or (-1, -1)]
    return Baseline(way, [str(compiled(f"{source}.c")), *ends, *filter(None, [last or where])])


class Baseline:
    """The two processes of a way, which a command starts with these variables in its environment.
    They use no CPU between rounds."""

    unit = 1  # round trips that are counted as one

    def __init__(self, way: str, command: Sequence[str], **variables: str):
        self.way, self._moved, pipe = way, (0, 0), subprocess.PIPE
        pipes: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": pipe}
        env = {**os.environ, **variables}
        self._process = subprocess.Popen(command, text=True, bufsize=1, env=env, **pipes)

    def __enter__(self) -> "Baseline":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def prepare(self, out: int, back: int) -> None:
        """The bytes there and home of the next rounds."""
        self._moved = out, back

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
        found: dict[str, Any] = json.loads(text)
        return found


def compiled(source: str, compiler: Sequence[str] | None = None) -> Path:
    """The program of a source beside this file, compiled if this version of it has not been yet:
    the name of its file holds a digest of all that it depends on.

    `compiler` is a command with its options, instead of that of LANGUAGES.

    Raises:
        BenchError: there is no compiler, or it failed.
    """
    program, _, language = source.partition(".")
    variable, usual, libraries, needs = LANGUAGES[language]
    command = [*(compiler or [os.environ.get(variable, usual[0]), *usual[1:]])]
    digest = hashlib.sha256(" ".join(command).encode())
    included = INCLUDE.rglob("*.h*") if language == "cc" else ()
    for path in sorted([*SOURCES.glob("*.h"), *included, SOURCES / source]):
        digest.update(path.read_bytes())
    directory = _cache()
    binary = directory / f"{program}-{digest.hexdigest()[:16]}"
    if binary.exists():
        return binary
    # Another benchmark may be at it too: each puts a whole file in place.
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        fresh = Path(scratch) / program
        command += [str(SOURCES / source), "-o", str(fresh), *libraries]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise BenchError(f"{command[0]}: not found: {source} needs {needs}") from None
        except subprocess.CalledProcessError as error:
            raise BenchError(f"cannot compile {source}:\n{error.stderr}") from None
        fresh.replace(binary)
    return binary


def _cache() -> Path:
    """A folder to which only this user may write, because programs are run from it."""
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fserver"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = directory.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(0, "others may write to it (run chmod go-w)")
    except OSError as error:
        text = f"cache folder {directory}: {error.strerror}, or set XDG_CACHE_HOME to another"
        raise BenchError(text) from None
    return directory
