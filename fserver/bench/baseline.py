"""The raw baselines: rawecho.c, rawcma.c and rawgpu.c beside this file, compiled when they are
first used and driven over their standard input."""

import hashlib
import hmac
import json
import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import BenchError

SOURCES = Path(__file__).resolve().parent
TIMEOUT = 600.0  # seconds; a round
MAX_BYTES = 1 << 32  # of a message: raw.h

CONNECT = 10.0  # seconds; until an end on another host is connected and has shown its token
ACCEPTED = b"\1"  # what a server says to the right token
GONE = 20  # seconds; after which a silent host is gone

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
    hint = ""  # what to do about an end that has ended

    def __init__(self, way: str, cores: tuple[int, int] | None, where: str | None = None):
        """`where`: for raw tcp the address of this host (default 127.0.0.1), for raw gpu the
        numbers of two GPUs, "0,1"."""
        program, argument = WAYS[way]
        worker, server = cores or (-1, -1)
        command = [str(compiled(f"{program}.c")), str(worker), str(server), argument or where]
        self._start(way, [word for word in command if word])

    def _start(self, way: str, command: list[str], inherited: tuple[int, ...] = ()) -> None:
        self.way = way
        self._out = self._back = 0
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            pass_fds=inherited,
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
                raise BenchError(f"the baseline {self.way} did not answer within {TIMEOUT:g} s")
            text = stdout.readline()
        except BrokenPipeError:
            text = ""
        if not text:
            _, errors = self._process.communicate()
            status = self._process.returncode
            raise BenchError(
                f"the baseline {self.way} ended with status {status}: {errors.strip()}{self.hint}"
            )
        return json.loads(text)


class FarBaseline(Baseline):
    """Raw tcp to a FarServer, which is on another host."""

    hint = " (see what the other host says; --no-baseline does without)"

    def __init__(self, core: int | None, host: str, port: int, token: str):
        program = str(compiled("rawecho.c"))
        try:
            with socket.create_connection((host, port), CONNECT) as conn:
                conn.sendall(token.encode())
                if conn.recv(1) != ACCEPTED:
                    raise BenchError(
                        f"raw tcp: port {port} of {host} did not accept the token (check whether "
                        "another program accepts the connections, or use --no-baseline)"
                    )
                _ready(conn)
                core = -1 if core is None else core
                command = [program, "client", str(core), str(conn.fileno())]
                self._start("raw tcp", command, (conn.fileno(),))
        except OSError as error:
            raise BenchError(
                f"raw tcp: cannot connect to port {port} of {host}: {error.strerror or error} (it "
                "is any free port: open all ports to this host, or use --no-baseline)"
            ) from None


class FarServer:
    """The server of raw tcp alone. Its client is a FarBaseline on another host, which has the
    same token; whoever else connects is sent away."""

    def __init__(self, host: str, token: str):
        """Listens on any free port of an address of this host.

        Raises:
            BenchError: it cannot, or the program cannot be compiled.
        """
        self._program = str(compiled("rawecho.c"))
        self._token = token.encode()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise BenchError(
                f"raw tcp: cannot listen on {host}: {error.strerror or error}"
            ) from None
        self.port = int(self._listener.getsockname()[1])

    def accept(self) -> bool:
        """Takes the client, on the cores of this process, and listens no more. False: it did not
        come in time."""
        end = time.monotonic() + CONNECT
        with self._listener:
            while (left := end - time.monotonic()) > 0:
                self._listener.settimeout(left)
                try:
                    conn = self._listener.accept()[0]
                except OSError:  # time is up, or this one is gone already
                    continue
                with conn:
                    conn.settimeout(1.0)  # what it has to say has few bytes
                    try:
                        if not hmac.compare_digest(conn.recv(len(self._token)), self._token):
                            continue
                        conn.sendall(ACCEPTED)
                    except OSError:
                        continue
                    _ready(conn)
                    fd = conn.fileno()
                    self._process = subprocess.Popen(
                        [self._program, "server", "-1", str(fd)], pass_fds=(fd,)
                    )
                    return True
        return False

    def close(self) -> None:
        """Ends it."""
        self._listener.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _ready(conn: socket.socket) -> None:
    """As rawecho wants a connection to another host: blocking, and with an end if that is gone."""
    conn.settimeout(None)
    conn.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, GONE // 4)
    conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, GONE // 4)
    conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE * 1000)


def compiled(source: str, compiler: Sequence[str] | None = None) -> Path:
    """The program, compiled if this version of it has not been yet.

    The name of the file holds a digest of all that it depends on, so it is never stale.

    Args:
        source: beside this file, "x.c"; "x.cu" needs a compiler.
        compiler: with its options; None: that of C.

    Raises:
        BenchError: there is no compiler, or it failed.
    """
    program, _, language = source.partition(".")
    command = [*(compiler or (os.environ.get("CC", "cc"), "-O2"))]
    digest = hashlib.sha256(" ".join(command).encode())
    for name in ("raw.h", source):
        digest.update((SOURCES / name).read_bytes())
    command.append(str(SOURCES / source))
    directory = _cache()
    binary = directory / f"{program}-{digest.hexdigest()[:16]}"
    if binary.exists():
        return binary
    # Another benchmark may be at it too: each puts a whole file in place.
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        fresh = Path(scratch) / program
        try:
            command += ["-o", str(fresh), "-lcuda" if language == "cu" else "-ldl"]
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            needs = "nvcc of the CUDA toolkit (set NVCC to its path)"
            if language == "c":
                needs = "a C compiler (run apt-get install gcc)"
            raise BenchError(f"{command[0]}: not found: raw baselines need {needs}") from None
        except subprocess.CalledProcessError as error:
            raise BenchError(f"cannot compile {source}:\n{error.stderr}") from None
        fresh.replace(binary)
    return binary


def _cache() -> Path:
    """Returns a folder to which only this user may write, because programs are run from it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(home) / "fserver"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner, mode = directory.stat().st_uid, directory.stat().st_mode
    except OSError as error:
        raise BenchError(
            f"cache folder {directory}: {error.strerror} (set XDG_CACHE_HOME to another folder)"
        ) from None
    if owner != os.geteuid() or mode & 0o022:
        raise BenchError(
            f"cache folder {directory}: others may write to it (run chmod go-w, or set "
            "XDG_CACHE_HOME to another folder)"
        )
    if not os.access(directory, os.W_OK):
        raise BenchError(
            f"cache folder {directory}: not writable (set XDG_CACHE_HOME to another folder)"
        )
    return directory
