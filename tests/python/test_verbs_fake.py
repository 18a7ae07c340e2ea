"""Nodes over verbs with the fake libibverbs of the tests of the engine. Its devices join the queue
pairs of one process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from nodes import LIMIT

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "cshim/verbs/fakeverbs/testdata"

PROGRAM = """
import ctypes, sys, torch
sys.path.insert(0, sys.argv[1])
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


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not Path("/usr/include/infiniband/verbs.h").exists():
        pytest.skip("no infiniband/verbs.h (libibverbs-dev)")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("fakeverbs")
    made = folder / "libibverbs.so.1"
    files = [SOURCES / "fake.c", SOURCES / "move.c"]
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", made, *files], check=True)
    return folder


def test_memory_is_registered_once(library: Path) -> None:
    """Pushed tensors, answers and pull tensors: a second push_pull of them registers nothing."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parent)],
        env={**os.environ, "LD_LIBRARY_PATH": str(library)},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
    )
    assert done.returncode == 0, done.stderr
    first, *later = map(int, done.stdout.split())
    assert first > 0
    assert later == [first] * 4
