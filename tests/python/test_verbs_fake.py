"""Nodes over verbs with the fake libibverbs of the tests of the engine. Its devices join the queue
pairs of one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import Forks
from nodes import LIMIT

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "cshim/verbs/fakeverbs/testdata"

PROGRAM = """
import ctypes, torch
import nodes

registered = ctypes.CDLL("libibverbs.so.1").fake_count
registered.restype, registered.argtypes = ctypes.c_long, [ctypes.c_char_p]
cluster = nodes.open_cluster(transport="verbs")
worker, server = cluster.worker, cluster.server
x, y, answer = torch.arange(4096.0), torch.zeros(4096), torch.arange(4096.0) + 1
counts = []
for turn in range(5):
    x += turn
    h = worker.push_pull([x, x[:7]], [1, 2], [y], [1])
    [(handler, [got, part], _)] = server.get_batch(10_000)
    assert torch.equal(got, x) and torch.equal(part, x[:7])
    server.respond([answer], handler)
    worker.wait(h, 10_000)
    assert torch.equal(y, answer)
    counts.append(registered(b"registered"))
[link] = [at for at in worker.links() if at.role == "server"]
assert link.transport == "verbs", link
cluster.close()
print(*counts)
"""

TWO_THREADS = """
import ctypes, faulthandler, threading, time, torch
import nodes

fake = ctypes.CDLL("libibverbs.so.1")
cluster = nodes.open_cluster(transport="verbs")
worker, server = cluster.worker, cluster.server
faulthandler.dump_traceback_later(30, exit=True)
x, handlers = torch.arange(1 << 20, dtype=torch.float32), []
fake.fake_set(b"stall", ctypes.c_long(x.nbytes))

def push(tensor, key):
    handlers.append(worker.push_pull([tensor], [key], [], []))

first = threading.Thread(target=push, args=(x, 1))
first.start()
while not fake.fake_count(b"stalled"):
    time.sleep(0.001)
second = threading.Thread(target=push, args=(x[:7], 2))
second.start()
time.sleep(0.5)  # second waits for the registration: without the GIL, or this does not end
fake.fake_set(b"stall", ctypes.c_long(0))
first.join()
second.join()
for _ in range(2):
    [(handler, [got], _)] = server.get_batch(10_000)
    assert torch.equal(got, x[: got.numel()])
    server.respond([], handler)
for h in handlers:
    worker.wait(h, 10_000)
cluster.close()
"""


DOCTORS = """
import os, sys, threading
from fserver import cli
from fserver.doctor import listen
server = listen.listen("127.0.0.1", 0)
threading.Thread(target=listen.serve, args=(server, b""), daemon=True).start()
status = cli.main(["doctor", "--json", "--peer", f"127.0.0.1:{server.getsockname()[1]}"])
sys.stdout.flush()
os._exit(status)  # an interpreter that ends aborts if a daemon thread is in a call of an extension
"""


@pytest.fixture(scope="module")
def verbs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Starts processes that find our libibverbs.so.1."""
    if not Path("/usr/include/infiniband/verbs.h").exists():
        pytest.skip("no infiniband/verbs.h (libibverbs-dev)")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("fakeverbs")
    made = folder / "libibverbs.so.1"
    files = sorted(SOURCES.glob("*.c"))
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", made, *files], check=True)
    forks = Forks(LD_LIBRARY_PATH=str(folder))
    yield forks
    forks.close()


def run(verbs: Forks, program: str) -> str:
    done = verbs.run("-c", program, limit=int(2 * LIMIT))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_memory_is_registered_once(verbs: Forks) -> None:
    """Pushed tensors, answers and pull tensors: a second push_pull of them registers nothing."""
    first, *later = map(int, run(verbs, PROGRAM).split())
    assert first > 0
    assert later == [first] * 4


def test_a_second_thread_waits_for_a_registration_without_the_gil(verbs: Forks) -> None:
    run(verbs, TWO_THREADS)


def doctors(verbs: Forks, **settings: str) -> tuple[int, dict[str, Any], dict[str, dict]]:
    """A doctor that asks another one of its process. Its status, what it found, and its lines about
    tensors."""
    done = verbs.run("-c", DOCTORS, limit=int(2 * LIMIT), FSERVER_LOG="error", **settings)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    (title,) = (t for t in found["sections"] if t.startswith("Tensors to "))
    return done.returncode, found, {check["name"]: check for check in found["sections"][title]}


def test_doctors_over_rdma(verbs: Forks) -> None:
    """`fserver doctor --peer` writes each size over RDMA and names device, port and GID of both."""
    settings = {
        "FSERVER_TRANSPORT": "verbs",
        "FSERVER_RDMA_TC": "106",
        "FSERVER_RDMA_DEVICE": "fake1",
    }
    status, found, lines = doctors(verbs, **settings)
    assert status == 0, lines
    path = (
        "fake1 port 1, GID 3 10.77.0.2 (RoCE v2) to GID 10.77.0.2, packets of 1024 bytes, "
        "traffic class 106"
    )
    assert lines["path here"]["text"] == lines["path there"]["text"] == path
    assert lines["transport"]["text"] == "verbs (FSERVER_TRANSPORT=verbs)"
    assert "1 B to 16 MiB was right" in lines["bytes"]["text"]
    assert "not used" not in lines
    sizes = found["tensors"]["sizes"]
    assert [s["bytes"] for s in sizes] == [4**i for i in range(13)]
    assert all(s["count"] >= 3 and s["round_trip_us"] > 0 and s["gb_s"] >= 0 for s in sizes)


def test_doctors_over_several_queue_pairs(verbs: Forks) -> None:
    settings = {"FSERVER_TRANSPORT": "verbs", "STEPAF_QP_NUM": "2"}
    status, _, lines = doctors(verbs, **settings)
    assert status == 0 and lines["transport"]["text"].startswith("verbs"), lines
    assert lines["path here"]["text"].startswith("fake0 port 1, GID 3 10.77.0.1 (RoCE v2) to GID ")


def long(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("settings", "name", "state", "text"),
    [
        long(
            {"FSERVER_TRANSPORT": "verbs", "FSERVER_RDMA_DEVICE": "nosuch"},
            "tensors",
            "no",
            "the listener cannot open a server: FSERVER_TRANSPORT=verbs: no RDMA device nosuch",
        ),
        long({"FSERVER_TRANSPORT": "tcp"}, "transport", "yes", "tcp (FSERVER_TRANSPORT=tcp)"),
        ({"BYTEPS_ENABLE_IPC": "0"}, "not used", "info", "verbs: one of the hosts has no device"),
        long({}, "transport", "yes", "cma"),
    ],
)
def test_doctors_without_rdma(
    verbs: Forks, settings: dict[str, str], name: str, state: str, text: str
) -> None:
    """Who asks for RDMA and gets none is told so. The doctor says what carried."""
    status, _, lines = doctors(verbs, **settings)
    assert (status, lines[name]["state"]) == (int(state == "no"), state), lines
    assert lines[name]["text"].startswith(text)
    assert ("not used" in lines) == (name == "not used")
