"""`fserver doctor`: what it says of this host, and of the cluster of the environment."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from reports import Doctor, line, states

import fserver
from fserver import _loader, cli
from fserver.doctor import cluster as described
from fserver.doctor import host, two
from fserver.doctor.report import Check, Report, size

SECRET = "a secret of decent length"
DENIED = ("", errno.EPERM)
ROOT = Path(__file__).resolve().parents[2]


# -- this host


def test_this_host(doctor: Doctor) -> None:
    status, found = doctor()
    assert status == 0
    assert set(found) == {"status", "sections", "host"}
    transports = states(found, "Transports")
    assert list(transports) == ["cudaipc", "cma", "verbs", "tcp", "shared memory"]
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
    assert {r["interface"] for r in found["host"]["auto_rails"]} == set(
        os.listdir("/sys/class/net")
    )
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

    monkeypatch.setattr(_loader, "engine", fail)
    status, found = doctor()
    assert status == 1
    engine = line(found, "Versions", "engine")
    assert (engine["text"], engine["remedy"]) == (
        "fserver: no extension here",
        "run `make af` in /src",
    )


@pytest.mark.parametrize(("role", "status"), [("", 1), ("scheduler", 0)])
def test_a_broken_torch(tmp_path: Path, role: str, status: int) -> None:
    """What is wrong with it is one line of many. A scheduler needs no torch."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise OSError('no libcudart.so.99')\n")
    (tmp_path / "torch/version.py").write_text("__version__ = '2.15.1'\n")
    done = subprocess.run(
        [sys.executable, "-m", "fserver", "doctor", "--json"],
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
            **({"DMLC_ROLE": role} if role else {}),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, done.stderr
    found = json.loads(done.stdout)
    assert line(found, "Versions", "torch")["text"] == "2.15.1"
    tensors = line(found, "Versions", "tensors")
    assert "importing torch fails: OSError: no libcudart.so.99" in tensors["text"]
    assert "pip install --force-reinstall" in tensors["remedy"]
    assert states(found, "Versions")["engine"] == states(found, "Transports")["tcp"] == "yes"


def test_one_process_writes_into_another() -> None:
    way, code = two.permitted()
    assert (way in ("plain", "ptracer")) == (code == 0)


@pytest.mark.parametrize(
    ("result", "state", "word"),
    [
        (("plain", 0), "yes", "can write"),
        (("ptracer", 0), "yes", "PR_SET_PTRACER"),
        (("", 1), "note", "Operation not permitted"),
        (("", 38), "note", "this kernel has no"),
        (("", -1), "note", "did not write into"),
    ],
)
def test_a_finding_that_two_processes_decide(
    monkeypatch: pytest.MonkeyPatch, result: tuple[str, int], state: str, word: str
) -> None:
    monkeypatch.setattr(two, "permitted", lambda: result)
    asked = {
        "what": "", "state": "yes", "text": "one copy", "remedy": "unset FSERVER_PTRACER",
        "test": two.WRITES_PERMITTED, "fails": "note", "else": "two copies",
    }  # fmt: skip
    found = host._tested(asked)
    assert found["state"] == state and word in found["text"]
    assert found["text"].startswith("one copy, " if state == "yes" else "two copies, ")
    assert bool(found["remedy"]) == (state != "yes")
    found = host._tested({**asked, "test": "process_vm_writev"})
    assert found["state"] == ("yes" if result[0] == "plain" else "note")
    assert (found["remedy"] == "unset FSERVER_PTRACER") == (result[0] == "ptracer")
    assert host._tested({**asked, "test": ""}) == {**asked, "test": ""}


def finding(what: str, state: str, text: str, remedy: str = "") -> dict[str, str]:
    return {"what": what, "state": state, "text": text, "remedy": remedy, "test": ""}


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
        "auto_rails": [{"interface": "rail0", "address": "10.2.0.1/24", "why_not": ""}],
        "engine": {"transports": ["nic", "tcp"], "backends": ["CPU"]},
        "transports": [
            {
                "name": "nic",
                "over": "",
                "findings": [
                    finding("mlx5_0", "no", "no link", "see the cable"),
                    finding("mlx5_2", "yes", "400 Gbit/s"),
                ],
            },
            {
                "name": "tcp",
                "over": "",
                "findings": [finding("", "yes", "IPv4")],
            },
        ],
        "limits": {
            "locked_memory_bytes": 65536, "open_files": 256, "open_files_hard": -1,
            "user_processes": -1, "dev_shm_bytes": 64 << 20, "dev_shm_free_bytes": 0,
            "ptrace_scope": 3,
        },
        "cores": {"free": 1, "online": 64, "allowed": [0, 1], "quota": 1.5, "limit": "cpu.max"},
        "clock": {"source": "hpet", "resolution_ns": 1},
    }  # fmt: skip


def test_what_auto_takes() -> None:
    """All interfaces that are used, or the one with the reason; then why not the others."""

    def rail(name: str, why: str = "") -> dict[str, str]:
        return {"interface": name, "address": f"10.0.{name[-1]}.1/24", "why_not": why}

    one = recorded(1)["auto"]
    others = [rail("eth2", "it is slow"), rail("eth3"), rail("eth4", "it is slow")]
    checks = list(host._auto(one, [rail("eth1"), *others]))
    assert [c.name for c in checks] == ["DMLC_INTERFACE=auto", "not used by auto"]
    assert checks[0].text.startswith("eth1 (10.0.1.1/24), eth3 (10.0.3.1/24): with each peer, ")
    assert checks[1].text == "eth2, eth4: it is slow"
    (alone,) = host._auto(one, [rail("rail0")])
    assert alone.text == "rail0 (10.2.0.1), RDMA device mlx5_0: near"


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
    assert of["nic"].state == "yes" and of["nic"].text == "mlx5_2: 400 Gbit/s"
    assert of["nic: mlx5_0"].state == "no" and of["nic: mlx5_0"].remedy == "see the cable"
    assert of["tcp"].text == "IPv4" and not of["nic"].fatal and of["tcp"].fatal
    assert of["mlx5_0"].state == "info" and "no port has a link" in of["mlx5_0"].text
    assert of["mlx5_1"].text == "RDMA device, port 1 Ethernet 400 Gb/sec"
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


def test_kernel(tmp_path: Path) -> None:
    bare = host.kernel(str(tmp_path))
    assert bare["limits"]["ptrace_scope"] == -1 and bare["limits"]["dev_shm_bytes"] == 0
    assert bare["clock"]["source"] == "" and bare["clock"]["resolution_ns"] > 0
    assert bare["modules"] == {} and bare["kernel"].startswith("Linux ")
    for name, text in {
        "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
        "proc/sys/kernel/yama/ptrace_scope": "2",
        "sys/module/nvidia/version": "570.86.15",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "sys/module/mlx5_ib").mkdir()
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = host.kernel(str(tmp_path))
    assert found["clock"]["source"] == "tsc"
    assert found["modules"] == {"nvidia": "570.86.15", "mlx5_ib": ""}
    limits = found["limits"]
    assert limits["ptrace_scope"] == 2
    assert limits["dev_shm_bytes"] >= limits["dev_shm_free_bytes"] > 0
    assert limits["open_files"] > 0


@pytest.mark.parametrize("old", [pytest.param(False, marks=pytest.mark.long), True])
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
        assert (
            "libnvidia-ml.so.1 has no function nvmlDeviceGetMigMode"
            in found["gpu_driver"]["reason"]
        )
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
    "settings", [{}, {"FSERVER_LOG": "error"}, {"FSERVER_SECRET": SECRET}, {"DMLC_INTERFACE": "lo"}]
)
def test_no_cluster(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    """Settings that describe no cluster make no other setting necessary."""
    describe(monkeypatch, **settings)
    status, found = doctor()
    (check,) = found["sections"]["Cluster"]
    assert status == 0 and check["state"] == "info"
    assert check["text"] == "the environment describes no cluster, so only this host was tested"
    for name in ("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"):
        assert name in check["remedy"]


@pytest.mark.parametrize(
    "settings",
    [
        {"DMLC_ROLE": "server"},
        {"DMLC_NUM_WORKER": "2"},
        {"DMLC_PS_ROOT_URI": "127.0.0.1"},
    ],
)
def test_a_part_of_a_cluster(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    describe(monkeypatch, **settings)
    assert "DMLC_PS_ROOT_PORT is not set" in refusal(doctor, "settings")["text"]
    monkeypatch.setenv("FSERVER_HOST_SCHEDULER", "1")  # on any free port
    status, found = doctor()
    assert status == 0 and states(found, "Cluster")["scheduler port"] == "yes"


@pytest.mark.parametrize(
    ("settings", "name", "word"),
    [
        ({"FSERVER_LOG": "loud"}, "settings", 'FSERVER_LOG="loud"'),
        ({"STEPMESH_BACKEND": "GPU", "STEPMESH_GPU": "7"}, "settings", "STEPMESH_GPU"),
        ({"FSERVER_TRANSPORT": "cma", "FSERVER_CMA": "direct"}, "transport", "not permitted"),
    ],
)
def test_a_setting_that_is_wrong_without_a_cluster(
    doctor: Doctor,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    name: str,
    word: str,
) -> None:
    monkeypatch.setattr(two, "permitted", lambda: DENIED)
    describe(monkeypatch, **settings)
    assert word in refusal(doctor, name)["text"]


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


def test_several_interfaces(doctor: Doctor, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Each is tested. Without one that is not there the process does not start."""
    common = {
        "DMLC_ROLE": "server",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_PS_ROOT_URI": "127.0.0.1",
    }
    describe(monkeypatch, **common, DMLC_INTERFACE="lo,nosuch0", FSERVER_SECRET=SECRET)
    check = refusal(doctor, "interface nosuch0")
    assert check["text"] == "this host has no such interface"
    _, found = doctor()
    assert line(found, "Cluster", "interface lo")["text"] == "127.0.0.1/8, up"


def test_a_transport_that_is_demanded() -> None:
    """What a node cannot open is fatal; a device that it does without is not."""
    host = {
        "gpu_error": "",
        "transport_error": "FSERVER_TRANSPORT=nic: no device (load its driver, or use another)",
        "device_errors": ["nic1: not available: port 1 is not active (see the cable)"],
        "transports": recorded(1)["transports"],
    }
    fatal, lost = described._demanded("nic", host)
    assert (fatal.text, fatal.fatal) == ("FSERVER_TRANSPORT=nic: no device", True)
    assert fatal.remedy == "load its driver, or use another"
    assert (lost.state, lost.remedy, lost.fatal) == ("no", "see the cable", False)
    (bare,) = described._demanded("auto", {**host, "transport_error": "a bug", "device_errors": []})
    assert (bare.text, bare.remedy) == ("a bug", "set FSERVER_TRANSPORT=auto")


@pytest.mark.parametrize("more", [{}, {"FSERVER_TLS": "1"}])
def test_rdma_that_is_demanded(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, port: int, more: dict[str, str]
) -> None:
    """The doctor refuses what a worker refuses, and so does one of no cluster."""
    if os.environ.get("FSERVER_TEST_RDMA") or Path("/sys/class/infiniband").exists():
        pytest.skip("this host may have RDMA")
    describe(monkeypatch, FSERVER_TRANSPORT="verbs", FSERVER_SECRET=SECRET, **more)
    said = refusal(doctor, "transport")["text"]
    assert said.startswith("FSERVER_TRANSPORT=verbs: ")
    describe(monkeypatch, DMLC_ROLE="worker", DMLC_PS_ROOT_PORT=str(port))
    assert refusal(doctor, "transport")["text"] == said
    with pytest.raises(fserver.ConfigError, match=re.escape(said)):
        fserver.Worker(connect=False)
    monkeypatch.setenv("DMLC_ROLE", "scheduler")
    assert doctor()[0] == 0


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
        ({"FSERVER_TRANSPORT": "cudaipc"}, "=cudaipc: gpu: not available", "unset FSERVER_TR"),
        ({"FSERVER_TRANSPORT": "cudaipc", "STEPMESH_BACKEND": "GPU"}, "STEPMESH_BACKEND=GPU: ", ""),
        (
            {"FSERVER_TRANSPORT": "cudaipc", "STEPMESH_BACKEND": "CPU"},
            "FSERVER_TRANSPORT=cudaipc with STEPMESH_BACKEND=CPU: it is for GPU tensors",
            "use cma, or STEPMESH_BACKEND=GPU",
        ),
        ({"STEPMESH_BACKEND": "GPU"}, "STEPMESH_BACKEND=GPU: gpu: not available", ""),
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


@pytest.mark.parametrize(
    ("settings", "probe", "word"),
    [
        ({"FSERVER_TRANSPORT": "cma", "FSERVER_CMA": "direct"}, DENIED, "not permitted"),
        ({"FSERVER_TRANSPORT": "cma", "FSERVER_CMA": "direct"}, ("ptracer", 0), ""),
        (
            {"FSERVER_TRANSPORT": "cma", "FSERVER_CMA": "direct", "FSERVER_PTRACER": "0"},
            ("ptracer", 0),
            "PR_SET_PTRACER",
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
    monkeypatch.setattr(two, "permitted", lambda: probe)
    if not word:
        status, found = doctor()
        assert status == 0, found["sections"]["Cluster"]
    else:
        check = refusal(doctor, "transport")
        assert check["text"].startswith("FSERVER_TRANSPORT=cma: FSERVER_CMA=direct ")
        assert word in check["text"] and "set FSERVER_TRANSPORT=auto" in check["remedy"]


def test_shared_memory_that_is_forbidden(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "memfd_create", forbidden)
    status, found = doctor()
    check = line(found, "Transports", "shared memory")
    assert (status, check["state"]) == (0, "no")
    assert "memfd_create fails: " in check["text"] and "seccomp" in check["remedy"]


def test_names_that_are_not_of_this_host() -> None:
    of = {"DMLC_PS_ROOT_URI": "a", "DMLC_PS_ROOT_PORT": "7000", "FSERVER_HOST_SCHEDULER": "0"}
    host = {
        "listen_warning": "a is 127.0.1.1 here (correct /etc/hosts)",
        "scheduler_error": "node: DMLC_PS_ROOT_URI=a is 10.0.0.4 (start it there)",
        "scheduler_listen": "",
    }
    note, no = described._addresses(of, "scheduler", host)
    assert (note.state, note.text) == ("note", "a is 127.0.1.1 here")
    assert note.remedy == "correct /etc/hosts"
    assert (no.name, no.fatal, no.remedy) == ("scheduler port", True, "start it there")
    host |= {"listen_warning": "", "scheduler_error": "", "scheduler_listen": "127.0.0.1"}
    (free,) = described._addresses({**of, "DMLC_PS_ROOT_PORT": "0"}, "scheduler", host)
    assert free.text == "this process can listen on 127.0.0.1:any free port"


def test_an_open_cluster_is_noted() -> None:
    of = {"FSERVER_SECRET": "", "FSERVER_SECRET_FILE": ""}
    (check,) = described._secret(of, {"listen": "10.0.0.9"})
    assert check.state == "note" and "every process that can connect" in check.text
