"""Tests whether a process of the cluster that the environment describes can start on this host."""

import socket
from collections.abc import Iterator
from typing import Any

from fserver import env
from fserver.settings import environment

from . import names
from .report import Check, Report, refused

TITLE = "Cluster"
HOSTED = "FSERVER_HOST_SCHEDULER"
AUTO = "set FSERVER_TRANSPORT=auto"
# What holds for all processes of a host, and describes no cluster.
OF_A_HOST = (
    "DMLC_ENABLE_RDMA",
    "DMLC_ENABLE_UCX",
    "DMLC_INTERFACE",
    "DMLC_LOCAL",
    "DMLC_NODE_HOST",
    "DMLC_PORT",
    "DMLC_PS_VAN_TYPE",
)
NONE = Check(
    "settings",
    "info",
    "the environment describes no cluster, so only this host was tested",
    "set DMLC_ROLE, DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT to test a cluster too",
)


def check(report: Report, values: dict[str, str], host: dict[str, Any]) -> None:
    """Tests the settings, addresses and ports of the process that the environment describes.

    If the environment describes no cluster, no setting is missing, and only the settings that are
    set are tested.
    """
    described = any(
        (name.startswith("DMLC_") and name not in OF_A_HOST) or name == HOSTED
        for name in environment()
    )
    found = env.settings(values)
    for warning in found["warnings"]:
        report.add(TITLE, Check("settings", "note", warning))
    errors = [e for e in found["errors"] if described or e not in found["missing"]]
    for error in errors:
        remedy = "correct this setting (`fserver env` prints the allowed values)"
        report.add(TITLE, Check("settings", "no", error, remedy, fatal=True))
    if errors:
        return
    of = {s["name"]: s["value"] for s in found["settings"]}
    role = of["DMLC_ROLE"]
    report.add(TITLE, _settings(of, role) if described else NONE)
    if role != "scheduler":
        report.add(TITLE, *_demanded(of["FSERVER_TRANSPORT"], host))
        report.add(TITLE, *_interfaces(of, host))
    if described:
        report.add(TITLE, *_addresses(of, role, host), *_secret(of, host))


def _settings(of: dict[str, str], role: str) -> Check:
    groups = f"{of['DMLC_NUM_WORKER']} worker groups and {of['DMLC_NUM_SERVER']} server groups"
    text = f"this process is a {role} of {groups} of {of['DMLC_GROUP_SIZE']} processes each"
    return Check("settings", "yes", text)


def _demanded(name: str, host: dict[str, Any]) -> Iterator[Check]:
    """Yields why this process cannot have the GPU or the transport that the settings demand: what
    the engine could not open, and the tests of two processes that failed."""
    if host["gpu_error"]:
        yield refused("device", host["gpu_error"], AUTO, fatal=True)
    if host["transport_error"]:
        yield refused("transport", host["transport_error"], AUTO, fatal=True)
    for error in host["device_errors"]:
        yield refused("transport", error, AUTO)
    ways = {way["name"]: way for way in host["transports"]}
    used = ways.get(name) and ways.get(ways[name]["over"], ways[name])
    for f in used["findings"] if used else ():
        if f["test"] and f["state"] == "no":
            text = f"FSERVER_TRANSPORT={name}: {f['text']}"
            yield Check("transport", "no", text, f"{f['remedy']}, or {AUTO}", fatal=True)


def _interfaces(of: dict[str, str], host: dict[str, Any]) -> Iterator[Check]:
    """Tests each of several interfaces. One that is down now may come up later."""
    listed = of["DMLC_INTERFACE"].split(",")
    nics = {n["name"]: n for n in host["nics"]}
    for name in listed if len(listed) > 1 else ():
        nic = nics.get(name)
        at = next((a for a in nic["addresses"] if not a.startswith("fe80:")), "") if nic else ""
        if not nic:
            text, remedy = "this host has no such interface", "correct DMLC_INTERFACE"
        elif not at:
            text, remedy = "it has no address", f"ip addr add ADDRESS/PREFIX dev {name}"
        elif not nic["up"]:
            text, remedy = f"{at}, down: no tensor travels over it", f"ip link set {name} up"
        else:
            yield Check(f"interface {name}", "yes", f"{at}, up")
            continue
        yield Check(f"interface {name}", "no", text, remedy, fatal=not at)


def _addresses(of: dict[str, str], role: str, host: dict[str, Any]) -> Iterator[Check]:
    at, port = of["DMLC_PS_ROOT_URI"], int(of["DMLC_PS_ROOT_PORT"] or 0)
    if host["listen_warning"]:
        text, _, remedy = host["listen_warning"].rstrip(")").rpartition(" (")
        yield Check("address", "note", text, remedy)
    settings = "DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
    if host["scheduler_error"]:
        remedy = f"set {settings} to an address of this host and a free port"
        yield refused("scheduler port", host["scheduler_error"], remedy, fatal=True)
    elif host["scheduler_listen"]:
        yield _free("scheduler port", host["scheduler_listen"], port, settings)
    else:
        yield _resolves(at, port)
    if role == "scheduler":
        return
    if host["listen_error"]:
        remedy = "set DMLC_NODE_HOST or DMLC_INTERFACE to an address or interface of this host"
        yield Check("address", "no", host["listen_error"], remedy, fatal=True)
    elif role == "server":
        address, settings = host["listen"], "DMLC_NODE_HOST and DMLC_PORT"
        if of["DMLC_INTERFACE"] == "auto" and not address.startswith(("127.", "::1")):
            address = host["auto"]["address"] or address
        yield _free("address", address, int(of["DMLC_PORT"] or 0), settings)
    else:
        yield _free("address", host["listen"], 0, "DMLC_NODE_HOST")


def _free(name: str, host: str, port: int, settings: str) -> Check:
    """Tests whether this process can listen on an address."""
    where = names.join(host, port or "any free port")
    try:
        family, kind, _, _, address = names.resolve(host, port)[0]
        with socket.socket(family, kind) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(address)
            s.listen(1)
    except OSError as e:
        remedy = f"set {settings} to an address of this host and a free port"
        text = f"cannot listen on {where}: {e.strerror or e}"
        return Check(name, "no", text, remedy, fatal=True)
    return Check(name, "yes", f"this process can listen on {where}")


def _resolves(host: str, port: int) -> Check:
    try:
        found = names.resolve(host, port)
    except OSError as e:
        remedy = "set DMLC_PS_ROOT_URI to an address, or to a name that this host can resolve"
        text = f"cannot resolve {host}: {e.strerror or e}"
        return Check("scheduler", "no", text, remedy, fatal=True)
    addresses = list(dict.fromkeys(str(f[4][0]) for f in found))
    text = names.join(host, port) + ("" if addresses == [host] else f" is {', '.join(addresses)}")
    remedy = f"`fserver doctor --peer {names.join(host, port)}` tests the path to it"
    return Check("scheduler", "yes", text, remedy)


def _secret(of: dict[str, str], host: dict[str, Any]) -> Iterator[Check]:
    if of["FSERVER_SECRET"] or of["FSERVER_SECRET_FILE"]:
        yield Check("secret", "yes", "a secret is set")
    elif host["listen"].startswith("127.") or host["listen"] in ("::1", "localhost"):
        yield Check("secret", "info", "no secret is set, and only this host can connect")
    else:
        remedy = "set FSERVER_SECRET or FSERVER_SECRET_FILE to the same secret on all nodes"
        text = "no secret is set, so every process that can connect can join the cluster"
        yield Check("secret", "note", text, remedy)
