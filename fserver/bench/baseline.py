"""The raw baselines: rawecho.c, rawcma.c and rawgpu.c beside this file, compiled when they are
first used and driven over their standard input."""

import hashlib
import json
import os
import select
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from .errors import BenchError

SOURCES = Path(__file__).resolve().parent
TIMEOUT = 600.0  # seconds; a round
MAX_BYTES = 1 << 32  # of a message: raw.h

# How bytes travel in each, as rows and plots name it: the program, and its last argument.
WAYS = {
    "raw tcp": ("rawecho", None),
    "raw cma": ("rawcma", "cma"),
    "raw shm": ("rawcma", "shm"),
    "raw gpu": ("rawgpu", None),
}

# Those whose bytes are in host memory.
HOST_WAYS = [way for way in WAYS if way != "raw gpu"]

# What does the same as a transport of fserver, without it.
OF_TRANSPORT = {"tcp": "raw tcp", "cma": "raw cma", "cudaipc": "raw gpu"}


def baseline_of(transport: str) -> str | None:
    """The baseline of a link, as Node.links() names it: "cma/staged" has that of "cma"."""
    return OF_TRANSPORT.get(transport.partition("/")[0])


class Baseline:
    """The two processes of one way. They use no CPU between rounds."""

    unit = 1  # round trips that are counted as one

    def __init__(self, way: str, cores: tuple[int, int] | None, where: str | None = None):
        """`where`: for raw tcp the address of this host (default 127.0.0.1), for raw gpu the
        numbers of two GPUs, "0,1"."""
        program, argument = WAYS[way]
        worker, server = cores or (-1, -1)
        command = [str(compiled(program)), str(worker), str(server), argument or where]
        self.way = way
        self._out = self._back = 0
        self._process = subprocess.Popen(
            [word for word in command if word],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> "Baseline":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def prepare(self, out: int, back: int) -> None:
        """The bytes there and home of the next rounds."""
        self._out, self._back = out, back

    def check(self, seed: int) -> None:
        """Nothing: each message carries its number, which both ends compare."""

    def measure(self, warmup: int, count: int) -> dict[str, Any]:
        """One round; figures in microseconds."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(f"{self._out} {self._back} {warmup} {count}\n")
            ready, _, _ = select.select([stdout], [], [], TIMEOUT)
            if not ready:
                raise BenchError(f"{self.way} did not answer in {TIMEOUT:g} s")
            text = stdout.readline()
        except BrokenPipeError:
            text = ""
        if not text:
            _, errors = self._process.communicate()
            raise BenchError(
                f"{self.way} ended with status {self._process.returncode}: {errors.strip()}"
            )
        return json.loads(text)


def compiled(program: str) -> Path:
    """The program, compiled if this version of it has not been yet.

    The name of the file holds a digest of all that it depends on, so it is never stale.

    Raises:
        BenchError: there is no compiler, or it failed.
    """
    command = [os.environ.get("CC", "cc"), "-O2", str(SOURCES / f"{program}.c")]
    digest = hashlib.sha256(command[0].encode())
    for name in ("raw.h", f"{program}.c"):
        digest.update((SOURCES / name).read_bytes())
    directory = _cache()
    binary = directory / f"{program}-{digest.hexdigest()[:16]}"
    if binary.exists():
        return binary
    # Another benchmark may be at it too: each puts a whole file in place.
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        fresh = Path(scratch) / program
        try:
            command += ["-o", str(fresh), "-ldl"]
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise BenchError(
                f"{command[0]}: not found: raw baselines need a C compiler (apt-get install gcc)"
            ) from None
        except subprocess.CalledProcessError as error:
            raise BenchError(f"compile {program}.c:\n{error.stderr}") from None
        fresh.replace(binary)
    return binary


def _cache() -> Path:
    """A directory that is the user's own, as programs are run from it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(home) / "fserver"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner, mode = directory.stat().st_uid, directory.stat().st_mode
    except OSError as error:
        raise BenchError(
            f"cache directory {directory}: {error.strerror} (set XDG_CACHE_HOME)"
        ) from None
    if owner != os.geteuid() or mode & 0o022:
        raise BenchError(
            f"cache directory {directory}: others may write to it (chmod go-w, or set "
            "XDG_CACHE_HOME)"
        )
    if not os.access(directory, os.W_OK):
        raise BenchError(f"cache directory {directory}: not writable (set XDG_CACHE_HOME)")
    return directory
