"""`fserver doctor`: what it says of this host, and of the path to others."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nodes import LIMIT, Cluster, eventually

import fserver
from fserver import _loader, cli
from fserver.doctor import cluster as described
from fserver.doctor import cma, host, listen, protocol
from fserver.doctor.protocol import Channel, Type
from fserver.doctor.report import Check, Report, size

SECRET = "a secret of decent length"
Doctor = Callable[..., tuple[int, dict]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs it with --json; gives status and output. The text says the same."""

    def run(*args: str) -> tuple[int, dict]:
        status = cli.main(["doctor", "--json", *args])
        found = json.loads(capsys.readouterr().out)
        assert found["status"] == status
        for checks in found["sections"].values():
            for check in checks:
                assert check["state"] in ("yes", "no", "note", "info")
                assert check["remedy"] or check["state"] != "no", check
        return status, found

    return run


def states(found: dict, section: str) -> dict[str, str]:
    return {check["name"]: check["state"] for check in found["sections"][section]}


def line(found: dict, section: str, name: str) -> dict:
    return next(check for check in found["sections"][section] if check["name"] == name)


# -- this host


def test_this_host(doctor: Doctor) -> None:
    status, found = doctor()
    assert status == 0
    assert set(found) == {"status", "sections", "host"}
    transports = states(found, "Transports")
    assert list(transports) == ["tcp", "cma", "shared memory", "cudaipc", "verbs", "ofi", "ucx"]
    assert transports["tcp"] == "yes"
    assert states(found, "Versions")["engine"] == "yes"
    assert {
        "locked memory",
        "open files",
        "/dev/shm",
        "ptrace scope",
        "free cores",
        "clock",
    } <= set(states(found, "Limits"))
    assert line(found, "Distances", "DMLC_INTERFACE=auto")["text"]
    known = {"gpus", "nics", "rdma", "numa", "cores", "limits", "clock", "kernel", "engine", "auto"}
    assert known | {"gpu_nic", "gpu_gpu", "modules", "notes"} <= set(found["host"])
    assert {nic["name"] for nic in found["host"]["nics"]} == set(os.listdir("/sys/class/net"))
    assert found["host"]["cores"]["free"] <= len(os.sched_getaffinity(0))


def test_text_fits_and_every_no_has_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in out
    for i, text in enumerate(lines):
        if text.startswith("  no "):
            rest = lines[i + 1 :]
            own = [t for t in rest[: next(k for k, t in enumerate(rest) if t[2:3] != " ")]]
            assert any(t.lstrip().startswith("-> ") for t in own), text


def test_colours_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    report = Report()
    report.add("Title", Check("note", "no", "no way", "another one"))
    out = Terminal()
    monkeypatch.delenv("NO_COLOR", raising=False)
    report.print(out)
    expected = "Title\n  \x1b[31mno\x1b[0m   note  no way\n             -> another one\n"
    assert out.getvalue() == expected
    out = Terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    report.print(out)
    assert "\x1b" not in out.getvalue()


def test_a_no_without_a_remedy_is_refused() -> None:
    with pytest.raises(AssertionError, match="x: no remedy"):
        Check("x", "no", "broken")


def test_sizes() -> None:
    values = [0, 1023, 1024, 3 << 29, 5 << 40, 5 << 50, -1]
    expected = ["0 B", "1023 B", "1 KiB", "1.5 GiB", "5 TiB", "5120 TiB", "unlimited"]
    assert [size(v) for v in values] == expected


def test_without_an_extension(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise _loader.LoadError("fserver: no extension here (run `make af` in /src)")

    monkeypatch.setattr(_loader, "load", fail)
    status, found = doctor()
    assert status == 1
    engine = line(found, "Versions", "engine")
    assert (engine["text"], engine["remedy"]) == (
        "fserver: no extension here",
        "run `make af` in /src",
    )


def test_cma_probe() -> None:
    way, code = cma.probe()
    assert (way in ("plain", "ptracer")) == (code == 0)


@pytest.mark.parametrize(
    ("result", "built", "state", "word"),
    [
        (("plain", 0), True, "yes", "can write"),
        (("ptracer", 0), True, "yes", "FSERVER_PTRACER=1"),
        (("plain", 0), False, "no", "not in this build"),
        (("", 1), False, "no", "not allow"),
        (("", 1), True, "note", "Operation not permitted"),
        (("", 38), True, "note", "not in this kernel"),
        (("", -1), True, "note", "did not write"),
    ],
)
def test_cma(
    monkeypatch: pytest.MonkeyPatch, result: tuple[str, int], built: bool, state: str, word: str
) -> None:
    monkeypatch.setattr(cma, "probe", lambda: result)
    check = host._cma(built)
    assert check.state == state and word in check.text
    assert bool(check.remedy) == (state != "yes")


def recorded(gpus: int) -> dict:
    """What the engine might say of a machine with GPUs, one RDMA card each."""
    nics = [
        {
            "name": f"rail{i}", "kind": "ethernet", "up": True, "mtu": 4200, "mbit_s": 400000,
            "driver": "mlx5_core", "pci": f"0000:{i:02x}:00.0", "numa": i // 4, "ports": [],
            "rdma": [f"mlx5_{i}"], "addresses": [f"10.2.{i}.1/24"], "not_announced": "",
        }
        for i in range(gpus)
    ]  # fmt: skip
    port = {"number": "1", "active": True, "link_layer": "Ethernet", "rate": "400 Gb/sec"}
    return {
        "gpus": [
            {
                "index": i, "name": "NVIDIA H200", "uuid": "", "pci": f"0000:{i:02x}:01.0",
                "numa": i // 4, "memory_bytes": 141 << 30, "mig": i == 1,
                "nvlinks": [{"to": "switch", "lanes": 18}],
            }
            for i in range(gpus)
        ],
        "gpu_driver": {"version": "570", "cuda": "12.8", "reason": ""},
        "nics": nics,
        "rdma": [
            {
                "name": f"mlx5_{i}", "pci": "", "numa": -1, "software": False,
                "ports": [{**port, "active": i != 0}],
                "nodes": [] if i == 1 else [f"/dev/infiniband/uverbs{i}"],
            }
            for i in range(gpus)
        ],
        "gpu_gpu": [[{"pcie": "SYS", "nvlinks": 18}] * gpus] * gpus,
        "gpu_nic": [["PIX" if i == j else "NODE" for j in range(gpus)] for i in range(gpus)],
        "auto": {"interface": "rail0", "address": "10.2.0.1", "rdma": "mlx5_0", "why": "near"},
        "engine": {"transports": ["tcp", "verbs"], "backends": ["CPU"]},
        "limits": {
            "locked_memory_bytes": 65536, "open_files": 256, "open_files_hard": -1,
            "user_processes": -1, "dev_shm_bytes": 64 << 20, "dev_shm_free_bytes": 0,
            "ptrace_scope": 3, "memfd": True,
        },
        "cores": {"free": 1, "online": 64, "allowed": [0, 1], "quota": 1.5, "limit": "cpu.max"},
        "clock": {"source": "hpet", "resolution_ns": 1},
    }  # fmt: skip


def test_a_large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    report, found = Report(), recorded(16)
    host.transports(report, found)
    host.devices(report, found)
    host.limits(report, found)
    out = io.StringIO()
    report.print(out)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    assert "MIG is on" in text and "NVLink 18 lanes to switch" in text
    of = {c.name: c for checks in report.sections.values() for c in checks}
    assert of["verbs"].state == "yes" and "mlx5_2" in of["verbs"].text
    assert of["cudaipc"].state == "yes" and "there are GPUs for it: 16" in of["cudaipc"].text
    assert of["mlx5_0"].state == "no" and "no port has a link" in of["mlx5_0"].text
    assert of["mlx5_1"].state == "no" and "--device" in of["mlx5_1"].remedy
    low = ("locked memory", "open files", "/dev/shm", "ptrace scope", "free cores", "clock")
    low += ("GPU queues",)
    assert {of[name].state for name in low} == {"note"}
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "²")  # a digit that int() refuses
    assert host._queues().state == "yes"
    table = report.tables["Distances"]
    assert len(table) % 17 == 0, "each part has a head and a line for each GPU"
    assert re.match(r" +gpu0 +gpu1 ", table[0])
    assert re.match(r"    gpu0 +- +NV18 +NV18 ", table[1])
    assert report.status == 0, "the host of nobody's cluster has nothing to fail"


@pytest.mark.parametrize("old", [False, True])
def test_gpu_driver(tmp_path: Path, old: bool) -> None:
    """The engine binds the driver's functions when it calls them, and asks for them before."""
    here = Path(__file__).parent
    library = tmp_path / "libnvidia-ml.so.1"
    flags = ["-DOLD"] if old else []
    command = ["gcc", "-shared", "-fPIC", *flags, here / "fake_nvml.c", "-o", library]
    subprocess.run(command, check=True)
    code = "from fserver import _loader; print(_loader.load().host(['CUDA_VISIBLE_DEVICES=1']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(here.parents[1]), "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if old:
        assert found["gpus"] == []
        assert "libnvidia-ml.so.1 has no nvmlDeviceGetMigMode" in found["gpu_driver"]["reason"]
        return
    assert found["gpu_driver"] == {"version": "570.86.15", "cuda": "12.8", "reason": ""}
    assert [(g["name"], g["uuid"], g["pci"], g["memory_bytes"]) for g in found["gpus"]] == [
        ("First", "GPU-1111", "0001:9a:00.0", 1 << 36),
        ("Second", "GPU-2222", "0001:ab:00.0", 1 << 37),
    ]
    assert found["gpus"][0]["nvlinks"] == [{"to": "switch", "lanes": 18}]
    assert found["gpu_gpu"][0][1] == {"pcie": "?", "nvlinks": 18}


# -- the cluster that the environment describes


def describe(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


def refusal(doctor: Doctor, name: str) -> dict:
    """The line for which the cluster would not start."""
    status, found = doctor()
    check = line(found, "Cluster", name)
    assert status == 1 and check["state"] == "no" and check["fatal"]
    return check


@pytest.mark.parametrize(
    ("settings", "name", "word"),
    [
        ({"DMLC_ROLE": "boss"}, "settings", "DMLC_ROLE"),
        ({"DMLC_INTERFACE": "nosuch0"}, "address", "DMLC_INTERFACE=nosuch0"),
        ({"DMLC_NODE_HOST": "192.0.2.77"}, "address", "192.0.2.77"),
        ({"DMLC_PS_ROOT_URI": "no.such.host.invalid"}, "scheduler", "resolve"),
        ({"STEPMESH_BACKEND": "GPU"}, "device", "STEPMESH_BACKEND=GPU"),
    ],
)
def test_a_cluster_that_would_not_start(
    doctor: Doctor,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    name: str,
    word: str,
) -> None:
    common = {"DMLC_ROLE": "server", "DMLC_PS_ROOT_PORT": "7000", "DMLC_PS_ROOT_URI": "127.0.0.1"}
    describe(monkeypatch, **{**common, **settings})
    assert word in refusal(doctor, name)["text"]


@pytest.mark.parametrize("role", ["scheduler", "joint", "server", "worker"])
def test_a_cluster_that_would_start(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, port: int, role: str
) -> None:
    describe(monkeypatch, DMLC_ROLE=role, DMLC_PS_ROOT_PORT=str(port), FSERVER_SECRET=SECRET)
    status, found = doctor()
    assert status == 0, found["sections"]["Cluster"]
    assert "no" not in states(found, "Cluster").values()
    assert SECRET not in json.dumps(found)


def test_the_scheduler_port_is_taken(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        describe(monkeypatch, DMLC_ROLE="scheduler", DMLC_PS_ROOT_PORT=port)
        status, found = doctor()
    assert status == 1
    assert "in use" in line(found, "Cluster", "scheduler port")["text"]


@pytest.mark.parametrize(
    ("settings", "word", "remedy"),
    [
        ({"FSERVER_TRANSPORT": "cudaipc"}, "=cudaipc: cudaipc: not available", "unset FSERVER_TR"),
        ({"FSERVER_TRANSPORT": "cudaipc", "STEPMESH_BACKEND": "GPU"}, "STEPMESH_BACKEND=GPU: ", ""),
        (
            {"FSERVER_TRANSPORT": "cudaipc", "STEPMESH_BACKEND": "CPU"},
            "FSERVER_TRANSPORT=cudaipc with STEPMESH_BACKEND=CPU: it is for GPU tensors",
            "use cma, or STEPMESH_BACKEND=GPU",
        ),
        ({"STEPMESH_BACKEND": "GPU"}, "STEPMESH_BACKEND=GPU: cudaipc: not available", ""),
    ],
)
def test_a_gpu_that_is_demanded(
    doctor: Doctor,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    word: str,
    remedy: str,
) -> None:
    """The doctor refuses what a node refuses. Nobody has a GPU of this number."""
    common = {"DMLC_PS_ROOT_PORT": "7000", "STEPMESH_GPU": "1023", "DMLC_GROUP_SIZE": "1024"}
    describe(monkeypatch, DMLC_ROLE="server", **common, **settings)
    check = refusal(doctor, "device")
    assert word in check["text"] and remedy in check["remedy"]
    with pytest.raises(fserver.ConfigError, match=re.escape(check["text"])):
        fserver.Server(connect=False)
    monkeypatch.setenv("DMLC_ROLE", "scheduler")  # which has no tensors
    for name in ("STEPMESH_GPU", "DMLC_GROUP_SIZE"):
        monkeypatch.delenv(name)
    assert doctor()[0] == 0


DENIED = ("", errno.EPERM)


@pytest.mark.parametrize(
    ("settings", "probe", "word"),
    [
        ({"FSERVER_TRANSPORT": "cma", "FSERVER_CMA": "direct"}, DENIED, "not permitted"),
        ({"FSERVER_TRANSPORT": "cma", "FSERVER_CMA": "direct"}, ("ptracer", 0), ""),
        (
            {"FSERVER_TRANSPORT": "cma", "FSERVER_CMA": "direct", "FSERVER_PTRACER": "0"},
            ("ptracer", 0),
            "FSERVER_PTRACER=1",
        ),
        (
            {"FSERVER_TRANSPORT": "cma", "FSERVER_CMA": "direct", "FSERVER_PTRACER": "0"},
            ("plain", 0),
            "",
        ),
        ({"FSERVER_TRANSPORT": "cma"}, DENIED, ""),  # two copies
        ({"FSERVER_CMA": "direct"}, DENIED, ""),  # tcp
        ({"FSERVER_TRANSPORT": "tcp", "FSERVER_CMA": "direct"}, DENIED, ""),
        (
            {"FSERVER_TRANSPORT": "cma", "FSERVER_CMA": "direct", "DMLC_ROLE": "scheduler"},
            DENIED,
            "",
        ),
    ],
)
def test_one_copy_that_is_demanded(
    doctor: Doctor,
    monkeypatch: pytest.MonkeyPatch,
    port: int,
    settings: dict[str, str],
    probe: tuple[str, int],
    word: str,
) -> None:
    """Fatal only where there is nothing to fall back to."""
    describe(monkeypatch, **{"DMLC_ROLE": "server", "DMLC_PS_ROOT_PORT": str(port), **settings})
    monkeypatch.setattr(cma, "probe", lambda: probe)
    if not word:
        status, found = doctor()
        assert status == 0, found["sections"]["Cluster"]
    else:
        check = refusal(doctor, "transport")
        assert check["text"].startswith("FSERVER_TRANSPORT=cma, FSERVER_CMA=direct: ")
        assert word in check["text"] and "unset FSERVER_CMA" in check["remedy"]


@pytest.mark.parametrize(
    ("transport", "status"), [("cma", 1), ("cudaipc", 1), ("auto", 0), ("tcp", 0)]
)
def test_shared_memory_that_is_demanded(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, port: int, transport: str, status: int
) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    describe(
        monkeypatch,
        DMLC_ROLE="worker",
        DMLC_PS_ROOT_PORT=str(port),
        FSERVER_TRANSPORT=transport,
    )
    monkeypatch.setattr(os, "memfd_create", forbidden)
    got, found = doctor()
    assert states(found, "Transports")["shared memory"] == "no"
    assert got == status, found["sections"]["Cluster"]
    if status:
        check = line(found, "Cluster", "transport")
        assert check["fatal"] and "seccomp" in check["remedy"]
        assert check["text"].startswith(f"FSERVER_TRANSPORT={transport}: memfd_create: ")


def test_an_open_cluster_is_noted() -> None:
    of = {"FSERVER_SECRET": "", "FSERVER_SECRET_FILE": ""}
    (check,) = described._secret(of, {"listen": "10.0.0.9"})
    assert check.state == "note" and "whoever can connect" in check.text


# -- the path to others


@pytest.fixture
def listener() -> Iterator[Callable[[str], str]]:
    """Starts a listening doctor with a secret in this process; gives its address."""
    servers = []

    def start(secret: str) -> str:
        server = listen.listen("127.0.0.1", 0)
        servers.append(server)
        threading.Thread(target=listen.serve, args=(server, secret.encode()), daemon=True).start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    yield start
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


@pytest.mark.parametrize("secret", ["", SECRET])
def test_peer(
    doctor: Doctor,
    listener: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    secret: str,
) -> None:
    if secret:
        monkeypatch.setenv("FSERVER_SECRET", secret)
    at = listener(secret)
    status, found = doctor("--peer", at)
    assert status == 0, found["sections"][f"Path to {at}"][-1]
    path = found["sections"][f"Path to {at}"]
    names = ["name", "reach", "mtu", "peer", "secret", "latency", "bandwidth", "way back"]
    assert [check["name"] for check in path] == names
    assert {check["state"] for check in path} == {"yes"}
    peer = found["peer"]
    assert peer["kind"] == "doctor" and peer["secret"] == ("same" if secret else "none")
    assert peer["mtu"] > 0 and peer["back"]
    assert 0 < peer["latency_us"]["p50"] <= peer["latency_us"]["p99"]
    assert peer["bandwidth_gb_s"]["out"] > 0 and peer["bandwidth_gb_s"]["in"] > 0
    assert [a["error"] for a in peer["addresses"]] == [""]


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        (SECRET, "another one", "differs"),
        (SECRET, "", "only here"),
        ("", SECRET, "only there"),
    ],
)
def test_secrets_that_differ(
    doctor: Doctor,
    listener: Callable[[str], str],
    cluster: Callable[..., Cluster],
    monkeypatch: pytest.MonkeyPatch,
    here: str,
    there: str,
    expected: str,
) -> None:
    """A doctor and a scheduler are told apart, and both lead to the same verdict."""
    scheduler = cluster(connect=False, **({"secret": there} if there else {})).scheduler.scheduler
    if here:
        monkeypatch.setenv("FSERVER_SECRET", here)
    for at in (listener(there), scheduler):
        status, found = doctor("--peer", at)
        assert status == 1
        assert found["peer"]["secret"] == expected
        assert line(found, f"Path to {at}", "secret")["fatal"]


@pytest.mark.parametrize(
    ("here", "there", "sides", "word"),
    [
        ("on", "on", "both", "on both sides"),
        ("on", "off", "only here", "this side has TLS, the node there has none"),
        ("off", "on", "only there", "the peer has TLS, this side has none"),
        ("off", "off", "none", "on neither side"),
    ],
)
def test_tls(
    doctor: Doctor,
    cluster: Callable[..., Cluster],
    monkeypatch: pytest.MonkeyPatch,
    here: str,
    there: str,
    sides: str,
    word: str,
) -> None:
    settings = {"FSERVER_TLS": there, "FSERVER_LOG": "error"}
    at = cluster(connect=False, secret=SECRET, settings=settings).scheduler.scheduler
    monkeypatch.setenv("FSERVER_SECRET", SECRET)
    monkeypatch.setenv("FSERVER_TLS", here)
    status, found = doctor("--peer", at)
    check = line(found, f"Path to {at}", "tls")
    assert status == (here != there), check
    assert found["peer"]["tls"] == sides and check["text"] == word
    assert here == there or check["fatal"] and "FSERVER_TLS must be on" in check["remedy"]
    assert here != there or found["peer"]["kind"] == "scheduler"


def test_tls_of_another_secret(
    doctor: Doctor, cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"FSERVER_TLS": "on", "FSERVER_LOG": "error"}
    at = cluster(connect=False, secret=SECRET, settings=settings).scheduler.scheduler
    monkeypatch.setenv("FSERVER_SECRET", "another one, quite as long")
    monkeypatch.setenv("FSERVER_TLS", "on")
    status, found = doctor("--peer", at)
    check = line(found, f"Path to {at}", "tls")
    assert status == 1 and check["text"] == "the peer's certificate does not come from our secret"
    assert check["remedy"].startswith("FSERVER_SECRET, FSERVER_CLUSTER and FSERVER_TLS_* must fit")


def test_doctors_talk_without_tls(
    doctor: Doctor, listener: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSERVER_SECRET", SECRET)
    monkeypatch.setenv("FSERVER_TLS", "on")
    status, found = doctor("--peer", listener(SECRET))
    assert status == 0 and found["peer"]["kind"] == "doctor"


def test_frames_that_are_sent_again(
    doctor: Doctor, cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"PS_RESEND": "1", "FSERVER_LOG": "error"}
    at = cluster(connect=False, settings=settings).scheduler.scheduler
    status, found = doctor("--peer", at)
    assert status == 1 and "PS_RESEND" in line(found, f"Path to {at}", "node")["remedy"]
    monkeypatch.setenv("PS_RESEND", "1")
    assert doctor("--peer", at)[0] == 0


def test_secret_from_a_file(
    doctor: Doctor, listener: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text(f" {SECRET}\n")
    monkeypatch.setenv("FSERVER_SECRET_FILE", str(file))
    assert doctor("--peer", listener(SECRET))[0] == 0
    file.unlink()
    status, found = doctor("--peer", listener(SECRET))
    assert status == 1 and "no such file" in json.dumps(found)


def test_a_running_cluster_is_not_disturbed(
    doctor: Doctor, cluster: Callable[..., Cluster]
) -> None:
    waiting = cluster(connect=False)
    at = waiting.scheduler.scheduler
    status, found = doctor("--peer", at)
    assert status == 0 and found["peer"]["kind"] == "scheduler"

    running = cluster()
    at = running.scheduler.scheduler
    status, found = doctor("--peer", at)
    assert status == 0
    assert found["peer"]["secret"] == "none"
    assert line(found, f"Path to {at}", "bandwidth")["state"] == "info"
    threads = [threading.Thread(target=node.stop) for node in running.nodes]
    [t.start() for t in threads], [t.join(LIMIT) for t in threads]
    assert all(node._node.closed for node in running.nodes)


def test_another_cluster(
    doctor: Doctor, cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = cluster(connect=False, cluster="blue").scheduler.scheduler
    monkeypatch.setenv("FSERVER_CLUSTER", "green")
    status, found = doctor("--peer", at)
    assert status == 1
    check = line(found, f"Path to {at}", "node")
    assert "blue" in check["text"] and "FSERVER_CLUSTER" in check["remedy"]


def test_ipv6(doctor: Doctor) -> None:
    try:
        server = listen.listen("::1", 0)
    except OSError as e:
        pytest.skip(f"no IPv6 loopback: {e}")
    with server:
        threading.Thread(target=listen.serve, args=(server, b""), daemon=True).start()
        at = f"[::1]:{server.getsockname()[1]}"
        status, found = doctor("--peer", at)
        server.shutdown(socket.SHUT_RDWR)
    assert status == 0 and found["peer"]["back"]
    assert set(states(found, f"Path to {at}").values()) == {"yes"}


def test_a_name_that_nobody_answers_for(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    monkeypatch.setattr("fserver.doctor.names.LIMIT", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: done.wait(LIMIT) and [])
    status, found = doctor("--peer", "somewhere:7000")
    done.set()
    assert status == 1
    assert "no answer within" in line(found, "Path to somewhere:7000", "name")["text"]


def test_nobody_there(doctor: Doctor, port: int) -> None:
    status, found = doctor("--peer", f"127.0.0.1:{port}")
    assert status == 1
    check = line(found, f"Path to 127.0.0.1:{port}", "reach")
    assert "refused" in check["text"] and "fserver doctor --listen" in check["remedy"]
    status, found = doctor("--peer", "no.such.host.invalid:7000")
    assert status == 1
    assert line(found, "Path to no.such.host.invalid:7000", "name")["state"] == "no"


def stranger(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something else that listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = server.accept()
                    with sock, contextlib.suppress(OSError):
                        answer(sock)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


HEADER = struct.Struct("<4sBI")


@pytest.mark.parametrize("tls", ["off", "on"])
@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.2p1\r\n",
        b"",
        b"FSRV\xff\xff\xff\xff",
        b"FSRV\x04\x00\x00\x00junk",
        HEADER.pack(b"fsdr", Type.WELCOME, 1 << 31),
        HEADER.pack(b"fsdr", Type.WELCOME, 3) + b"abc",
        HEADER.pack(b"fsdr", Type.WELCOME, 34) + bytes([9, 0]) + bytes(32),
        HEADER.pack(b"fsdr", 99, 0),
    ],
)
def test_garbage(doctor: Doctor, monkeypatch: pytest.MonkeyPatch, garbage: bytes, tls: str) -> None:
    monkeypatch.setenv("FSERVER_SECRET", SECRET)
    monkeypatch.setenv("FSERVER_TLS", tls)

    def answer(sock: socket.socket) -> None:
        sock.sendall(garbage)
        sock.settimeout(1)
        sock.recv(64)

    with contextlib.contextmanager(stranger)(answer) as at:
        status, found = doctor("--peer", at)
    assert status == 1
    assert any(c["state"] == "no" for c in found["sections"][f"Path to {at}"])
    assert found["peer"]["kind"] in ("unknown", "node")


def test_silence_has_a_bound(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HANDSHAKE_LIMIT", 0.2)
    monkeypatch.setattr("fserver.doctor.peer.PROBE_LIMIT_MS", 200)
    done = threading.Event()
    with contextlib.contextmanager(stranger)(lambda sock: done.wait(LIMIT) and None) as at:
        begin = time.monotonic()
        status, found = doctor("--peer", at)
        done.set()
    assert status == 1 and time.monotonic() - begin < 10
    assert "nothing came in time" in line(found, f"Path to {at}", "peer")["text"]


# -- what a listening doctor takes


def channel(at: str) -> Channel:
    host, _, port = at.partition(":")
    return Channel(socket.create_connection((host, int(port)), LIMIT))


@pytest.mark.parametrize(
    "request_",
    [
        (Type.ECHO, bytes(protocol.MAX_ECHO + 1)),
        (Type.CALL, struct.pack("<H16s", 22, bytes(16))),
        (Type.CALL, b"short"),
        (Type.FETCH, b"x"),
        (99, b""),
    ],
)
def test_requests_that_are_refused(
    listener: Callable[[str], str], request_: tuple[int, bytes]
) -> None:
    one = channel(listener(""))
    with one.sock:
        protocol.call(one, b"")
        one.send(*request_)
        if request_[1][:2] == struct.pack("<H", 22):
            assert bytes(one.expect(Type.DONE)) == b"that port is not for this"
        else:
            with pytest.raises((protocol.ProtocolError, OSError)):
                one.receive()


def test_nothing_is_done_before_the_secret(listener: Callable[[str], str]) -> None:
    at = listener(SECRET)
    for kind in (Type.ECHO, Type.FETCH, Type.CALL, Type.PROOF, Type.DATA):
        one = channel(at)
        with one.sock, pytest.raises((protocol.ProtocolError, OSError)):
            one.send(kind, bytes(4))
            one.receive()
    # Who does not know the secret cannot pass with the listener's own proof.
    one = channel(at)
    with one.sock:
        hello = struct.pack("<BB32s", 1, 1, bytes(32))
        one.send(Type.HELLO, hello)
        welcome = bytes(one.expect(Type.WELCOME))
        one.send(Type.PROOF, welcome[-32:])
        assert one.receive()[0] == Type.REFUSED


@pytest.mark.parametrize("key", [b"", SECRET.encode()])
def test_random_messages(key: bytes) -> None:
    """A session with a caller that sends what is nearly right ends, and raises nothing."""
    rng = random.Random(7)
    calls = [
        (Type.HELLO, struct.pack("<BB32s", protocol.VERSION, bool(key), bytes(32))),
        (Type.PROOF, b""),
        (Type.ECHO, bytes(8)),
        (Type.DATA, bytes(100)),
        (Type.END, b""),
        (Type.CALL, struct.pack("<H16s", 22, bytes(16))),
    ]
    with socket.create_server(("127.0.0.1", 0)) as server:
        for turn in range(400):
            said = calls if turn % 2 else rng.choices(calls, k=rng.randint(1, 9))
            text = bytearray(b"".join(HEADER.pack(b"fsdr", k, len(d)) + d for k, d in said))
            for _ in range(turn // 2 % 4):
                text[rng.randrange(len(text))] = rng.randrange(256)
            caller = socket.create_connection(server.getsockname())
            with caller, server.accept()[0] as taken:
                caller.sendall(text)
                caller.shutdown(socket.SHUT_WR)
                listen._session(Channel(taken), "caller", key)


def test_a_stream_has_an_end(listener: Callable[[str], str]) -> None:
    one = channel(listener(""))
    with one.sock:
        protocol.call(one, b"")
        one.send(Type.FETCH, struct.pack("<I", 1 << 31))
        count, took = protocol.drain(one)
    assert count > 0 and took < (protocol.STREAM_LIMIT + 3) * 1e9


def test_sessions_are_bounded(listener: Callable[[str], str]) -> None:
    at = listener("")

    def count() -> int:
        return sum(thread.name == listen.NAME for thread in threading.enumerate())

    eventually(lambda: count() == 0)
    silent = [channel(at) for _ in range(3 * listen.SESSIONS)]
    eventually(lambda: count() == listen.SESSIONS)
    for one in silent:
        assert count() <= listen.SESSIONS
        one.sock.close()
    eventually(lambda: count() == 0)


def test_the_command_line() -> None:
    """A listening process and one that tries it, as two hosts would."""
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "FSERVER_SECRET": SECRET}
    command = [sys.executable, "-m", "fserver", "doctor"]
    listening = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"], env=env, stderr=subprocess.PIPE, text=True
    )
    _, err = listening.communicate(timeout=60)
    assert listening.returncode == 2 and "port from 1 to 65535" in err

    listening = subprocess.Popen(
        [*command, "--listen"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        first = listening.stdout.readline()
        port = re.fullmatch(r"listening on 0\.0\.0\.0:(\d+)\n", first)[1]
        done = subprocess.run(
            [*command, "--peer", f"localhost:{port}"],
            env=env, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "yes  secret     the same on both sides\n" in done.stdout
    finally:
        listening.terminate()
        _, err = listening.communicate(timeout=60)
    assert "the same secret" in err and SECRET not in err + done.stdout
