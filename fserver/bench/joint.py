"""A pair that DMLC_ROLE=joint starts: one command becomes the launcher, which starts scheduler,
server and worker from it, each with fserver.init().

    python -m fserver.bench.joint SOCKET WORKER_CORE SERVER_CORE

is that command; the worker and the server connect to SOCKET to be told what to do.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from .crew import START_TIMEOUT, Crew, Member, Peer, Place, ending, load, obey
from .errors import BenchError
from .host import transport_settings

ACTORS = {"worker": "actors.WorkerActor", "server": "actors.ServerActor"}


@contextlib.contextmanager
def joint(transport: str, cores: tuple[int, int] | None, device: str = "cpu") -> Iterator[Crew]:
    """A worker and a server, connected; with device "gpu", on one GPU."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        path = str(Path(directory) / "socket")  # of this user alone, as the directory is
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen()
        listener.settimeout(0.2)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "STEPMESH_"))}
        env.update(transport_settings(transport), DMLC_ROLE="joint")
        env.update(STEPMESH_BACKEND=device.upper(), STEPMESH_GPU="0")
        command = [sys.executable, "-m", "fserver.bench.joint", path, *map(str, cores or (-1, -1))]
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        launcher = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        stack.callback(_end, launcher)
        peers: list[Peer] = []
        stack.enter_context(ending(peers))
        end = time.monotonic() + START_TIMEOUT
        while len(peers) < 2:
            if launcher.poll() is not None or time.monotonic() > end:
                log.seek(0)
                raise BenchError(f"DMLC_ROLE=joint could not start the pair:\n{log.read()}")
            with contextlib.suppress(TimeoutError):
                conn = Connection(listener.accept()[0].detach())
                role = conn.recv()
                peers.append(Peer(Member(role, ACTORS[role], role), conn))
        peers.sort(key=lambda peer: peer.name == "server")
        crew = Crew(peers)
        crew.results(START_TIMEOUT)
        yield crew
        crew.all("leave")


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """It ends with its processes, or is told to."""
    try:
        launcher.wait(30)
    except subprocess.TimeoutExpired:
        launcher.terminate()
        launcher.wait()


def main() -> None:
    """Life of the launcher, and of the worker and the server that it starts."""
    path, worker_core, server_core = sys.argv[1:]
    role = os.environ["DMLC_ROLE"]
    core = int(worker_core if role == "worker" else server_core)
    if role in ACTORS and core >= 0:
        os.sched_setaffinity(0, {core})
    import fserver
    from fserver import fserver_lib

    fserver.init()  # does not return in the launcher
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        conn = Connection(sock.detach())
    conn.send(role)
    actor = load(ACTORS[role])(lambda place: fserver_lib._node)
    actor.connect([Place(role, 0, 1, 1, "", {})])
    obey(conn, lambda: actor)


if __name__ == "__main__":
    main()
