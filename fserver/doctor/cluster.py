"""Whether the cluster that the environment describes would start here."""

import socket
from collections.abc import Iterator

from fserver import env
from fserver.api import environment

from . import cma, names
from .host import SHARED_MEMORY, TRANSPORTS
from .report import Check, Report

TITLE = "Cluster"


def check(report: Report, values: dict[str, str], host: dict) -> None:
    """Settings, addresses and ports of the process that this environment describes."""
    if not environment():
        text = "no setting is given, so there is no cluster to check"
        report.add(TITLE, Check("settings", "info", text, "`fserver env` lists the settings"))
        return
    found = env.settings(values)
    for warning in found["warnings"]:
        report.add(TITLE, Check("settings", "note", warning))
    for error in found["errors"]:
        remedy = "correct it; `fserver env` says what is allowed"
        report.add(TITLE, Check("settings", "no", error, remedy, fatal=True))
    if found["errors"]:
        return
    of = {s["name"]: s["value"] for s in found["settings"]}
    role = of["DMLC_ROLE"]
    groups = f"{of['DMLC_NUM_WORKER']} worker and {of['DMLC_NUM_SERVER']} server groups"
    text = f"a {role} in a cluster of {groups} of {of['DMLC_GROUP_SIZE']}"
    report.add(TITLE, Check("settings", "yes", text))
    shared = next(c for c in report.sections[TRANSPORTS] if c.name == SHARED_MEMORY)
    report.add(TITLE, *_gpu(host), *_transport(of, role, shared))
    report.add(TITLE, *_addresses(of, role, host), *_secret(of, host))


def _gpu(host: dict) -> Iterator[Check]:
    if host["gpu_error"]:
        text, _, remedy = host["gpu_error"].rpartition(" (")
        remedy = remedy.rstrip(")")
        if text.startswith("FSERVER_TRANSPORT=cudaipc: "):  # which STEPMESH_BACKEND=CPU refuses too
            remedy = (
                "unset FSERVER_TRANSPORT, or let this process see the GPU that STEPMESH_GPU names"
            )
        yield Check("device", "no", text, remedy, fatal=True)


def _transport(of: dict[str, str], role: str, shared: Check) -> Iterator[Check]:
    """Whether the one transport that is demanded can work; auto has tcp to fall back to."""
    name = f"FSERVER_TRANSPORT={of['FSERVER_TRANSPORT']}"
    if role == "scheduler" or of["FSERVER_TRANSPORT"] not in ("cma", "cudaipc"):
        return
    if shared.state == "no":
        text, remedy = f"{name}: {shared.text}", f"{shared.remedy} (or unset FSERVER_TRANSPORT)"
        yield Check("transport", "no", text, remedy, fatal=True)
    if of["FSERVER_CMA"] == "direct":
        way, code = cma.probe()
        text, remedy = cma.words(way, code)
        if way == "ptracer" and of["FSERVER_PTRACER"] == "0":
            way, remedy = "", "unset FSERVER_PTRACER"
        if not way:
            text, remedy = f"{name}, FSERVER_CMA=direct: {text}", f"{remedy} (or unset FSERVER_CMA)"
            yield Check("transport", "no", text, remedy, fatal=True)


def _addresses(of: dict[str, str], role: str, host: dict) -> Iterator[Check]:
    at, port = of["DMLC_PS_ROOT_URI"], int(of["DMLC_PS_ROOT_PORT"] or 0)
    hosted = of["FSERVER_HOST_SCHEDULER"] == "1"
    if role in ("scheduler", "joint") or hosted:
        own = of["DMLC_NODE_HOST"] if role == "scheduler" else ""
        yield _free("scheduler port", own or at, port, "DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT")
    else:
        yield _resolves(at, port)
    if role == "scheduler":
        return
    if host["listen_error"]:
        remedy = "name an address or interface of this host (DMLC_NODE_HOST, DMLC_INTERFACE)"
        yield Check("address", "no", host["listen_error"], remedy, fatal=True)
    elif role == "server":
        address, settings = host["listen"], "DMLC_NODE_HOST and DMLC_PORT"
        if of["DMLC_INTERFACE"] == "auto" and not address.startswith(("127.", "::1")):
            address = host["auto"]["address"] or address
        yield _free("address", address, int(of["DMLC_PORT"] or 0), settings)
    else:
        yield _free("address", host["listen"], 0, "DMLC_NODE_HOST")


def _free(name: str, host: str, port: int, settings: str) -> Check:
    """Whether this process could listen there."""
    where = names.join(host, port or "any free port")
    try:
        family, kind, _, _, address = names.resolve(host, port)[0]
        with socket.socket(family, kind) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(address)
            s.listen(1)
    except OSError as e:
        remedy = f"{settings} must name an address of this host, and a port that nobody has"
        return Check(name, "no", f"listen on {where}: {e.strerror or e}", remedy, fatal=True)
    return Check(name, "yes", f"{where} can be listened on")


def _resolves(host: str, port: int) -> Check:
    try:
        found = names.resolve(host, port)
    except OSError as e:
        remedy = "DMLC_PS_ROOT_URI must be an address, or a name that this host can resolve"
        return Check("scheduler", "no", f"resolve {host}: {e.strerror or e}", remedy, fatal=True)
    addresses = list(dict.fromkeys(str(f[4][0]) for f in found))
    text = names.join(host, port) + ("" if addresses == [host] else f" is {', '.join(addresses)}")
    remedy = f"`fserver doctor --peer {names.join(host, port)}` tries the way there"
    return Check("scheduler", "yes", text, remedy)


def _secret(of: dict[str, str], host: dict) -> Iterator[Check]:
    if of["FSERVER_SECRET"] or of["FSERVER_SECRET_FILE"]:
        yield Check("secret", "yes", "set")
    elif host["listen"].startswith("127.") or host["listen"] in ("::1", "localhost"):
        yield Check("secret", "info", "none is set, and only this host can connect")
    else:
        remedy = "set FSERVER_SECRET or FSERVER_SECRET_FILE on all nodes"
        yield Check("secret", "note", "none is set: whoever can connect can join", remedy)
