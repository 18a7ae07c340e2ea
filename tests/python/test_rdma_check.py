"""tools/rdma_check.sh between two network namespaces, as two hosts would run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_containers import needs

SCRIPT = Path(__file__).parents[2] / "tools/rdma_check.sh"
HOSTS = {"server": "10.79.0.1", "client": "10.79.0.2"}
SHORT = {
    "SIZES": "64,4K",
    "SECONDS_EACH": "120",
    "WAIT": "60",
    "PYTHON": sys.executable,
}


@pytest.fixture
def spaces() -> Iterator[dict[str, str]]:
    """Two network namespaces with a wire between them, by role."""
    if os.getuid():
        pytest.skip("only root makes network namespaces")
    needs("ip")
    names = {role: f"fserver-{role}-{os.getpid()}" for role in HOSTS}
    try:
        for name in names.values():
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        wire = ("type", "veth", "peer", "name", "wire", "netns", names["client"])
        ip("-n", names["server"], "link", "add", "wire", *wire)
        for role, host in HOSTS.items():
            ip("-n", names[role], "addr", "add", f"{host}/24", "dev", "wire")
            ip("-n", names[role], "link", "set", "wire", "up")
        yield names
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no network namespaces: {done.stderr.strip()}")


def start(
    names: dict[str, str], role: str, results: Path, **settings: str
) -> subprocess.Popen[str]:
    words = [role] if role == "server" else [role, HOSTS["server"]]
    return subprocess.Popen(
        ["ip", "netns", "exec", names[role], str(SCRIPT), *words],
        env={**os.environ, **SHORT, "RESULTS": str(results), **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def states(out: str) -> dict[str, str]:
    """The state of each step."""
    return {words[1]: words[0] for words in map(str.split, out.splitlines()) if len(words) > 2}


@pytest.mark.long
def test_two_hosts(spaces: dict[str, str], tmp_path: Path) -> None:
    steps = {"STEPS": "doctor tests peer bytes layers tcp perftest gpu nccl nixl"}
    both = {role: start(spaces, role, tmp_path / role, **steps) for role in HOSTS}
    out = {role: process.communicate(timeout=300)[0] for role, process in both.items()}
    for role, process in both.items():
        assert process.returncode == 0, out
        found = states(out[role])
        assert [found[s] for s in ("start", "doctor", "peer", "bytes", "layers", "tcp")] == [
            "ok"
        ] * 6
        assert "skip" == found["tests"] == found["perftest"] == found["nixl"], out[role]
        assert "this host has no RDMA device" in out[role]
        assert "only if both hosts have it: nixl" in out[role]
        assert len(out[role].splitlines()) < 25, "it fits on a screen"
        with tarfile.open(tmp_path / f"{role}.tar.gz") as packed:
            files = {Path(name).name for name in packed.getnames()}
        assert {"summary.txt", "facts.txt", "doctor.log", "bytes.log", "layers.log"} <= files
    assert re.search(r"bytes .* tcp, 64 B \d+ us, 4096 B \d+ us$", out["client"], re.MULTILINE)
    assert re.search(r"layers .* tcp, 917504 B \d+ us$", out["client"], re.MULTILINE)
    rows = json.loads((tmp_path / "client/bytes.json").read_text())["rows"]
    assert [(row["bytes_out"], row["transport"]) for row in rows] == [(64, "tcp"), (4096, "tcp")]
    assert "transport  tcp" in (tmp_path / "client/peer.log").read_text()
    for step in ("layers", "tcp"):
        [row] = json.loads((tmp_path / f"client/{step}.json").read_text())["rows"]
        assert (row["bytes_out"], row["bytes_back"]) == (896 << 10, 1792 << 10)
        assert row["p50_us"] > 0 and row["transport"] == "tcp"


# A module that plays NIXL between processes of one machine: a WRITE goes by /proc/PID/mem.
NIXL = """
import os, socket

class nixl_agent_config:
    def __init__(self, enable_prog_thread):
        assert enable_prog_thread is False

class nixl_agent:
    def __init__(self, name, config):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(f"{os.environ['FAKE_NIXL']}/{name}")
        self.socket.setblocking(False)
        self.name = name
    def register_memory(self, tensors):
        assert [t.device.type for t in tensors] == ["cpu"]
    def get_agent_metadata(self):
        return f"{os.getpid()} {self.name}".encode()
    def add_remote_agent(self, metadata):
        return metadata
    def get_xfer_descs(self, rows, kind):
        assert kind == "DRAM"
        return rows[0][:2]
    def initialize_xfer(self, what, ours, theirs, peer, note):
        assert what == "WRITE" and ours[1] == theirs[1]
        return ours, theirs, peer.split()
    def transfer(self, transfer, note):
        (source, n), (target, _), (pid, name) = transfer
        with open("/proc/self/mem", "rb", 0) as a, open(f"/proc/{pid}/mem", "wb", 0) as b:
            os.pwrite(b.fileno(), os.pread(a.fileno(), n, source), target)
        self.socket.sendto(note, f"{os.environ['FAKE_NIXL']}/{name}")
        return "DONE"
    def get_new_notifs(self):
        try:
            return {"peer": [self.socket.recv(100)]}
        except BlockingIOError:
            return {}
"""


@pytest.mark.long
def test_nixl(spaces: dict[str, str], tmp_path: Path) -> None:
    """The step of a host that has NIXL, which is played here: what is written, and what is said."""
    module = tmp_path / "modules/nixl_cu12"
    module.mkdir(parents=True)
    (module / "__init__.py").touch()
    (module / "_api.py").write_text(NIXL)
    more = {"STEPS": "nixl", "PYTHONPATH": str(module.parent), "FAKE_NIXL": str(tmp_path)}
    both = {role: start(spaces, role, tmp_path / role, **more) for role in HOSTS}
    out = {role: process.communicate(timeout=200)[0] for role, process in both.items()}
    for role, process in both.items():
        assert process.returncode == 0, out
        assert states(out[role])["nixl"] == "ok", out
    assert "cpu memory, 4 KiB" in out["client"] and ", 1 MiB" in out["client"]
    rows = json.loads((tmp_path / "client/nixl.json").read_text())["rows"]
    sizes = [(row["bytes_out"], row["bytes_back"]) for row in rows]
    assert sizes == [(4096, 4096), (1 << 20, 1 << 20), (896 << 10, 1792 << 10)]
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in rows)


@pytest.mark.long
def test_a_step_that_fails(spaces: dict[str, str], tmp_path: Path) -> None:
    """RDMA is demanded, and there is none: the step fails on both sides, and the next ones run."""
    steps = {"STEPS": "peer bytes doctor", "TRANSPORT": "verbs"}
    both = {role: start(spaces, role, tmp_path / role, **steps) for role in HOSTS}
    for role, process in both.items():
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 1
        assert states(out)["bytes"] == "FAIL", out
        assert states(out)["peer"] == ("FAIL" if role == "client" else "ok"), out
        assert role == "server" or re.search(r"^FAIL peer .* no +tensors ", out, re.MULTILINE), out
        assert "FSERVER_TRANSPORT=verbs: list the devices" in out, out
        assert re.search(r"^FAIL doctor .* FSERVER_TRANSPORT=verbs: ", out, re.MULTILINE), out


@pytest.mark.long
def test_a_step_that_hangs(spaces: dict[str, str], tmp_path: Path) -> None:
    """It is ended when its time is over, and the next step runs."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in *"bench pingpong"*) sleep 100 ;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    steps = {"STEPS": "bytes perftest", "SECONDS_EACH": "2", "PYTHON": str(python)}
    both = {role: start(spaces, role, tmp_path / role, **steps) for role in HOSTS}
    for process in both.values():
        out, _ = process.communicate(timeout=100)
        assert process.returncode == 1
        assert states(out)["bytes"] == "FAIL" and "no end within 2 s" in out, out
        assert states(out)["perftest"] == "skip", out


def test_nobody_there(spaces: dict[str, str], tmp_path: Path) -> None:
    """A host whose other one does not come ends, and says so."""
    for role in HOSTS:
        begin = time.monotonic()
        process = start(spaces, role, tmp_path / role, WAIT="1")
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 1 and states(out)["start"] == "FAIL"
        assert "7471" in out and time.monotonic() - begin < 60
        assert (tmp_path / f"{role}.tar.gz").exists()


def test_usage() -> None:
    for words in ([], ["client"], ["other"]):
        done = subprocess.run([SCRIPT, *words], capture_output=True, text=True)
        assert done.returncode == 2 and "rdma_check.sh client SERVER" in done.stdout


# Plays the toolchain and UCX's benchmark: it says how it was called, and fails if FAILS is in that.
PLAYED = """#!/bin/sh
all="$(basename "$0") $* over $FSERVER_TEST_RDMA"
echo "$all"
case "$all" in *"$FAILS"*) exit 3 ;; esac
echo "--- PASS: TestOne (0.00s)"
echo "    --- PASS: TestOne/half (0.00s)"
echo "--- SKIP: TestTwo (0.00s)"
echo "Final:     1000     1.2     1.3     1.25     7.4     7.4     9697     9697"
"""


def played(spaces: dict[str, str], tmp_path: Path, **more: str) -> dict[str, str]:
    """What both roles print, on hosts that have go and ucx_perftest."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("go", "ucx_perftest"):
        (tools / name).write_text(PLAYED)
        (tools / name).chmod(0o755)
    more = {"PATH": f"{tools}:{os.environ['PATH']}", "FAILS": "nothing", **more}
    both = {role: start(spaces, role, tmp_path / role, **more) for role in HOSTS}
    return {role: process.communicate(timeout=100)[0] for role, process in both.items()}


def test_tests(spaces: dict[str, str], tmp_path: Path) -> None:
    """Each host runs the tests of the repository over its own devices."""
    out = played(spaces, tmp_path, STEPS="tests", TEST_DEVICES="mlx5_0,mlx5_1")
    for role in HOSTS:
        assert re.search("ok +tests .* 4 passed, 2 skipped, over mlx5_0,mlx5_1", out[role]), out
        log = (tmp_path / role / "tests.log").read_text()
        assert "./engine/transport/verbs ./engine/node over mlx5_0,mlx5_1" in log


def test_tests_fail(spaces: dict[str, str], tmp_path: Path) -> None:
    out = played(spaces, tmp_path, STEPS="tests", TEST_DEVICES="rxe0", FAILS="./engine/node")
    for role in HOSTS:
        assert re.search("FAIL +tests", out[role]), out


@pytest.mark.long
def test_ucx(spaces: dict[str, str], tmp_path: Path) -> None:
    """UCX's own benchmark runs with the sizes of a layer, the last of which is 1.75 MiB."""
    out = played(spaces, tmp_path, STEPS="ucx")
    for role in HOSTS:
        assert states(out[role])["ucx"] == "ok", out
        assert ", 917504 B 1.25 us, 1835008 B 1.25 us" in out[role]
        for size in (4096, 917504, 1835008):
            log = (tmp_path / role / f"ucx-{size}.log").read_text()
            assert f"-s {size}" in log and (HOSTS["server"] in log) == (role == "client")
