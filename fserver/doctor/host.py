"""The tests of this host: engine, transports, devices, limits."""

import json
import mmap
import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fserver
from fserver import _loader, versions

from . import two
from .report import Check, Report, refused, size

MIB = 1 << 20
TRANSPORTS = "Transports"
SHARED_MEMORY = "shared memory"
MAKE = "run `make af`"

MODULES = (
    "nvidia", "nvidia_peermem", "gdrdrv", "mlx5_core", "mlx5_ib", "ib_core", "irdma", "efa",
    "rdma_rxe", "siw",
)  # fmt: skip


def engine(report: Report, values: dict[str, str]) -> dict[str, Any] | None:
    """Reports the versions of all parts. Returns what the engine and the kernel say of this host,
    or None if the engine cannot be loaded."""
    title = "Versions"
    try:
        extension = _loader.engine()
    except _loader.LoadError as e:
        report.add(title, *_versions(None), refused("engine", str(e), MAKE, fatal=True))
        return None
    found: dict[str, Any] = (
        json.loads(extension.host([f"{n}={v}" for n, v in values.items()])) | kernel()
    )
    report.data["host"] = found
    about = found["engine"]
    report.add(
        title, Check("engine", "yes", f"{about['version']}, wire {about['wire']}, {about['go']}")
    )
    report.add(title, *_versions(extension.__file__))
    try:
        _loader.load()
    except _loader.LoadError as e:
        needed = values.get("DMLC_ROLE", "").lower() != "scheduler"
        report.add(title, refused("tensors", str(e), MAKE, fatal=needed))
    report.add(title, Check("kernel", "info", found["kernel"]), *_drivers(found))
    for note in found["notes"]:
        remedy = "the findings below may be incomplete; let this process read it"
        report.add(
            title, Check("topology", "note", note, "" if "NVIDIA GPU at" in note else remedy)
        )
    return found


def kernel(root: str = "/") -> dict[str, Any]:
    """Returns limits, clock, name and modules of the kernel, for this process. A limit of -1 is
    none; so is a ptrace scope of -1, where the kernel has no Yama. root is for tests."""

    def text(name: str, otherwise: str = "") -> str:
        try:
            return Path(root, name).read_text().strip()
        except OSError:
            return otherwise

    open_files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        shm = os.statvfs(Path(root, "dev/shm"))
        total, free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    except OSError:
        total = free = 0
    source = text("sys/devices/system/clocksource/clocksource0/current_clocksource")
    modules = {name: Path("sys/module", name) for name in MODULES}
    return {
        "limits": {
            "locked_memory_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            "open_files": open_files,
            "open_files_hard": most,
            "user_processes": resource.getrlimit(resource.RLIMIT_NPROC)[0],
            "dev_shm_bytes": total,
            "dev_shm_free_bytes": free,
            "ptrace_scope": int(text("proc/sys/kernel/yama/ptrace_scope", "-1")),
        },
        "clock": {
            "source": source,
            "resolution_ns": round(time.clock_getres(time.CLOCK_MONOTONIC) * 1e9),
        },
        "kernel": f"{platform.system()} {platform.release()}",
        "modules": {
            name: text(f"{at}/version") for name, at in modules.items() if Path(root, at).exists()
        },
    }


def _versions(file: str | None) -> Iterator[Check]:
    yield Check("fserver", "info", fserver.__version__)
    if file:
        yield Check("extension", "info", Path(file).name)
    yield Check("torch", "info", versions.torch())
    yield Check("Python", "info", f"{platform.python_version()}, {sys.executable}")


def _drivers(found: dict[str, Any]) -> Iterator[Check]:
    driver = found["gpu_driver"]
    if driver["version"]:
        yield Check("GPU driver", "info", f"{driver['version']}, for CUDA up to {driver['cuda']}")
    modules = [f"{name} {version}".strip() for name, version in found["modules"].items()]
    if modules:
        yield Check("kernel modules", "info", ", ".join(modules))


def transports(report: Report, found: dict[str, Any]) -> None:
    """Reports for each transport whether it works here. The last one reaches everybody."""
    for way in found["transports"]:
        way["findings"] = [_tested(f) for f in way["findings"]]
        report.add(TRANSPORTS, *_findings(way, last=way is found["transports"][-1]))
    report.add(TRANSPORTS, _shared_memory(found["limits"]))


def _findings(way: dict[str, Any], last: bool) -> Iterator[Check]:
    """Yields what a transport's own probe says. The first line says whether one of its devices
    can be used."""
    found = sorted(way["findings"], key=lambda f: ("yes", "note", "no", "info").index(f["state"]))
    for i, f in enumerate(found):
        name = f"{way['name']}: {f['what']}" if i and f["what"] else way["name"]
        text = f"{f['what']}: {f['text']}" if not i and f["what"] else f["text"]
        yield Check(name, f["state"], text, f["remedy"], fatal=last)


def _tested(f: dict[str, Any]) -> dict[str, Any]:
    """Runs the test that a finding names, if any. Returns the finding with its result."""
    if not f["test"]:
        return f
    works, why, remedy = two.test(f["test"], f["remedy"])
    if works:
        return {**f, "text": f"{f['text']}, because {why}", "remedy": ""}
    return {**f, "state": f["fails"], "text": f"{f['else']}, because {why}", "remedy": remedy}


def _shared_memory(limits: dict[str, Any]) -> Check:
    """Tests anonymous shared memory, which is passed to another process as a file descriptor."""
    try:
        fd = os.memfd_create("fserver", os.MFD_CLOEXEC)
    except (OSError, AttributeError) as e:
        remedy = "in a container, use a seccomp profile that allows memfd_create"
        return Check(SHARED_MEMORY, "no", f"memfd_create fails: {e}", remedy)
    left, right = socket.socketpair(socket.AF_UNIX)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        socket.send_fds(left, [b"x"], [fd])
        _, (passed,), _, _ = socket.recv_fds(right, 1, 1)
        try:
            with mmap.mmap(fd, mmap.PAGESIZE) as one, mmap.mmap(passed, mmap.PAGESIZE) as other:
                one[:8] = b"fserver!"
                same = other[:8] == b"fserver!"
        finally:
            os.close(passed)
    except OSError as e:
        remedy = "raise the limits on memory and open files (ulimit -a)"
        text = f"memory cannot be passed to another process: {e}"
        return Check(SHARED_MEMORY, "no", text, remedy)
    finally:
        left.close()
        right.close()
        os.close(fd)
    if not same:
        text = "two mappings of one descriptor do not show the same bytes"
        return Check(SHARED_MEMORY, "no", text, "report this")
    text = f"memfd works; /dev/shm has {size(limits['dev_shm_bytes'])}"
    return Check(SHARED_MEMORY, "yes", text)


def devices(report: Report, found: dict[str, Any]) -> None:
    """Reports the GPUs, the network interfaces, their distances, and what `auto` chooses."""
    gpus, nics = found["gpus"], found["nics"]
    title = "GPUs"
    for g in gpus:
        parts = [g["name"], size(g["memory_bytes"]), g["pci"], _numa(g)]
        parts += [f"NVLink {link['lanes']} lanes to {link['to']}" for link in g["nvlinks"]]
        if g["mig"]:
            parts.append("MIG is on")
        report.add(title, Check(f"gpu {g['index']}", "info", ", ".join(filter(None, parts))))
    if not gpus:
        report.add(title, Check("none", "info", found["gpu_driver"]["reason"] or "none is visible"))

    title = "Network interfaces"
    for n in nics:
        report.add(title, Check(n["name"], "info", _nic(n)))
    for d in found["rdma"]:
        report.add(title, _rdma(d))

    title = "Distances"
    shown = [i for i, n in enumerate(nics) if n["rdma"] or not n["not_announced"]]
    if gpus:
        text = (
            "the path from one to the other leads over: PIX one PCIe switch, PXB several PCIe "
            "switches, PHB a PCIe host bridge, NODE several host bridges of a NUMA node, SYS "
            "another NUMA node"
        )
        if any(path["nvlinks"] for row in found["gpu_gpu"] for path in row):
            text += ", NV# that number of NVLink lanes"
        report.add(title, Check("", "info", text))
        names = [f"gpu{g['index']}" for g in gpus] + [nics[i]["name"] for i in shown]
        rows = []
        for i, row in enumerate(found["gpu_gpu"]):
            cells = [f"NV{p['nvlinks']}" if p["nvlinks"] else p["pcie"] for p in row]
            cells[i] = "-"
            rows.append(cells + [found["gpu_nic"][i][j] for j in shown])
        report.tables[title] = list(_matrix(names, rows))
    report.add(title, *_auto(found["auto"], found["auto_rails"]))


def _auto(one: dict[str, Any], rails: list[dict[str, Any]]) -> Iterator[Check]:
    """Yields what DMLC_INTERFACE=auto takes, and why not the other interfaces."""
    used = [f"{r['interface']} ({r['address']})" for r in rails if not r["why_not"]]
    text = f"{one['interface'] or 'no interface'}"
    text += f" ({one['address']})" if one["address"] else ""
    text += f", RDMA device {one['rdma']}" if one["rdma"] else ""
    text += f": {one['why']}"
    if len(used) > 1:
        text = f"{', '.join(used)}: with each peer, those whose network the peer has too"
    yield Check("DMLC_INTERFACE=auto", "info", text)
    names: dict[str, list[str]] = {}
    for r in rails:
        if r["why_not"]:
            names.setdefault(r["why_not"], []).append(r["interface"])
    for why, several in names.items():
        yield Check("not used by auto", "info", f"{', '.join(several)}: {why}")


def _numa(thing: dict[str, Any]) -> str:
    return f"NUMA node {thing['numa']}" if thing["numa"] >= 0 else ""


def _nic(n: dict[str, Any]) -> str:
    addresses = " ".join(a for a in n["addresses"] if not a.startswith("fe80:"))
    parts = [n["kind"], "up" if n["up"] else "down", addresses, f"MTU {n['mtu']}"]
    if n["mbit_s"]:
        parts.append(f"{n['mbit_s'] / 1000:g} Gbit/s")
    parts += [n["driver"], n["pci"], _numa(n)]
    if n["ports"]:
        parts.append(f"made of {' '.join(n['ports'])}")
    if n["rdma"]:
        parts.append(f"RDMA {' '.join(n['rdma'])}")
    if n["not_announced"]:
        parts.append(f"not announced: {n['not_announced']}")
    return ", ".join(filter(None, parts))


def _rdma(d: dict[str, Any]) -> Check:
    """What the kernel shows of a device. Whether it can be used is a finding of its transport."""
    ports = [f"port {p['number']} {p['link_layer']} {p['rate']}" for p in d["ports"] if p["active"]]
    parts = ["RDMA device", *(ports or ["no port has a link"]), d["pci"], _numa(d)]
    parts.append("software" if d["software"] else "")
    return Check(d["name"], "info", ", ".join(filter(None, parts)))


def _matrix(names: list[str], rows: list[list[str]], width: int = 92) -> Iterator[str]:
    """Yields the lines of a table, in as many parts as the width requires."""
    left = 4 + max(len(name) for name in names[: len(rows)])
    columns = [max(len(names[j]), *(len(row[j]) for row in rows)) for j in range(len(names))]
    start = 0
    while start < len(names):
        end, used = start, left
        while end < len(names) and (end == start or used + columns[end] + 2 <= width):
            used += columns[end] + 2
            end += 1
        part = range(start, end)
        yield " " * left + "".join(f"  {names[j]:>{columns[j]}}" for j in part)
        for name, row in zip(names, rows, strict=False):
            yield f"    {name:<{left - 4}}" + "".join(f"  {row[j]:>{columns[j]}}" for j in part)
        start = end


def limits(report: Report, found: dict[str, Any]) -> None:
    """Reports the limits of this process."""
    title = "Limits"
    values, cores, clock = found["limits"], found["cores"], found["clock"]
    rdma = any(d["nodes"] for d in found["rdma"])
    locked = values["locked_memory_bytes"]
    low = rdma and 0 <= locked < 1 << 30
    report.add(
        title,
        _limit(
            "locked memory",
            size(locked),
            low,
            "raise it, because RDMA locks all memory that travels: ulimit -l unlimited",
        ),
        _limit(
            "open files",
            f"{_count(values['open_files'])} (up to {_count(values['open_files_hard'])})",
            0 <= values["open_files"] < 1024,
            "raise it, because each connection needs one: ulimit -n 65536",
        ),
        _limit("processes", _count(values["user_processes"]), False, ""),
        _limit(
            "/dev/shm",
            f"{size(values['dev_shm_bytes'])}, {size(values['dev_shm_free_bytes'])} free",
            values["dev_shm_bytes"] <= 64 * MIB,
            "fserver does not need it, but torch's data loaders do: in a container, --shm-size=8g",
        ),
    )
    scope = values["ptrace_scope"]
    names = {
        0: "all processes of a user may access each other",
        1: "a process must allow the access",
        2: "only root may access other processes",
    }
    text = f"{scope} ({names.get(scope, 'no process may access another one')})"
    remedy = "for one copy between processes, set sysctl kernel.yama.ptrace_scope=1"
    report.add(
        title,
        _limit("ptrace scope", text if scope >= 0 else "no limit (no Yama)", scope > 1, remedy),
        _cores(cores),
    )
    if found["gpus"]:
        report.add(title, _queues())
    fast = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter", "")
    report.add(
        title,
        _limit(
            "clock",
            f"CLOCK_MONOTONIC from {clock['source'] or 'an unknown source'}, "
            f"resolution {clock['resolution_ns']} ns",
            clock["source"] not in fast,
            "every reading of this clock is a system call; boot with clocksource=tsc if the "
            "machine has a stable tsc",
        ),
    )


def _queues() -> Check:
    value = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip()
    text = f"CUDA_DEVICE_MAX_CONNECTIONS={value}" if value else "the default of CUDA"
    low = value.isdecimal() and int(value) < 8
    remedy = "a stream that waits for a message blocks other streams: unset it, or set it to 32"
    return _limit("GPU queues", text, low, remedy)


def _limit(name: str, text: str, low: bool, remedy: str) -> Check:
    return Check(name, "note", text, remedy) if low else Check(name, "yes", text)


def _count(n: int) -> str:
    return "unlimited" if n < 0 else str(n)


def _cores(cores: dict[str, Any]) -> Check:
    text = (
        f"{cores['free']} ({cores['online']} online, {len(cores['allowed'])} in the affinity mask"
    )
    if cores["quota"]:
        text += f", a quota of {cores['quota']:g} from {cores['limit']}"
    low = cores["free"] < 3
    remedy = "calls drive progress themselves, because a polling thread needs a core of its own"
    return _limit("free cores", text + ")", low, remedy)
