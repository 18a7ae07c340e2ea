"""The functions of StepMesh's ``fserver_lib``, on one node that the environment describes.

``import fserver_lib``, ``import fserver`` and ``from fserver import fserver_lib`` give the same
functions. None of them loads the engine: the first call that needs it does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from fserver import _loader
from fserver.api import Link, Node, Scheduler, Server, Worker
from fserver.errors import ClosedError, ConfigError, Error
from fserver.notify import Notify

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "SimpleNotify",
    "barrier",
    "fail",
    "fetch_trace",
    "finalize",
    "get_all_handlers",
    "get_batch",
    "get_nanosecond",
    "init",
    "links",
    "map_pinned_tensor",
    "push_pull",
    "register_recv_buffer",
    "respond",
    "respond_vec",
    "seq_add_one",
    "stop",
    "wait",
    "wait_flag",
    "worker_of",
    "write_flag",
]


class _Worker(Worker):
    """Keeps to StepMesh, and goes on counting handlers where the worker before has stopped."""

    def _make(self, extension: ModuleType, lines: list[str]) -> Any:
        return extension.StepmeshWorker(lines, _next_handler)


class _Server(Server):
    """Keeps to StepMesh."""

    def _make(self, extension: ModuleType, lines: list[str]) -> Any:
        return extension.StepmeshServer(lines)


_node: Node | None = None
_next_handler = 0
_slow: dict[str, Any] = {}  # the functions below, while faster ones are in their place


def init() -> None:
    """Opens the node that the environment describes (DMLC_ROLE, default ``server``), and returns
    when the whole cluster is connected.

    With DMLC_ROLE=joint, this process becomes ``fserver run``, which starts scheduler, servers
    and workers of this host, each with this process's command line.

    Raises:
        ConfigError: a setting is wrong; the text has its name, its value and what is allowed.
        TimeoutError: the cluster was not complete within FSERVER_INIT_TIMEOUT seconds.
        Error: the node is open already.
    """
    global _node
    if _node is not None and not _node.closed:
        raise Error("init: the node is open already: call stop() before the next init()")
    role = os.environ.get("DMLC_ROLE", "").strip().lower() or "server"
    if role == "joint":
        _become_launcher()
    classes: dict[str, type[Node]] = {
        "worker": _Worker,
        "server": _Server,
        "scheduler": Scheduler,
    }
    if role not in classes:
        raise ConfigError(
            f"DMLC_ROLE={os.environ['DMLC_ROLE']!r}: want worker, server, scheduler or joint"
        )
    _node = classes[role].from_env()
    _bind(_node)


def _become_launcher() -> NoReturn:
    from fserver.api import inherited
    from fserver.env import settings

    found = settings(inherited())
    if found["errors"]:
        raise ConfigError("\n".join(found["errors"]))
    count = {s["name"]: s["value"] for s in found["settings"]}
    command = [sys.executable, "-m", "fserver", "run"]
    command += ["--workers", count["DMLC_NUM_WORKER"]]
    command += ["--servers", count["DMLC_NUM_SERVER"]]
    command += ["--group-size", count["DMLC_GROUP_SIZE"]]
    command += ["--", sys.executable, *sys.orig_argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)


def stop() -> None:
    """Leaves the cluster together with all other nodes, and closes the node.

    Waits for the others to stop too, at most FSERVER_STOP_TIMEOUT seconds. Does nothing if there
    is no open node.

    Raises:
        PeerLostError: another node was lost instead of stopping. This one is closed.
        TimeoutError: the others did not stop in time. This one is closed.
    """
    global _node, _next_handler
    node = _node
    if node is None:
        return
    try:
        node.stop()
    finally:
        if node.closed and _node is node:
            if isinstance(node, Worker):
                _next_handler = node._node.next_handler
            _unbind()
            _node = None


finalize = stop


def _spaces() -> list[dict[str, Any]]:
    """The namespaces in which callers look for the functions."""
    return [vars(sys.modules[name]) for name in ("fserver", "fserver.fserver_lib")]


def _bind(node: Node) -> None:
    """Puts the methods of the extension in the place of the functions of this module, where
    callers look them up at each call. Saves two frames of Python, 0.15 us a call."""
    for name in node._methods:
        _slow.setdefault(name, globals()[name])
        for space in _spaces():
            space[name] = getattr(node, name)


def _unbind() -> None:
    for name, function in _slow.items():
        for space in _spaces():
            space[name] = function


def _method(name: str) -> Any:
    if _node is None:
        raise ClosedError(f"{name}: there is no node: call init() first")
    if name not in _node._methods:
        raise ConfigError(
            f"{name}: this process is a {_node._role} (DMLC_ROLE), which has no {name}"
        )
    return getattr(_node, name)


def push_pull(
    push_tensors: Sequence[Tensor],
    push_keys: Sequence[int],
    pull_tensors: Sequence[Tensor],
    pull_keys: Sequence[int],
    need_event: bool = True,
) -> int:
    """As Worker.push_pull, with what StepMesh's programs need.

    - Handlers are counted from 0 in this process.
    - A pull tensor may belong to an open push_pull. The answers that come later are written over
      those that came before.
    - An answer may be of any type: its bytes are written to the pull tensor as they are.
    """
    return _method("push_pull")(push_tensors, push_keys, pull_tensors, pull_keys, need_event)


def wait(handler: int, timeout_ms: float = 10000) -> None:
    """As Worker.wait, but ``timeout_ms`` counts from the push_pull, as in StepMesh. If that was
    longer ago, the request is only looked at."""
    _method("wait")(handler, timeout_ms)


def get_all_handlers(handler: int) -> list[int]:
    """See Worker.get_all_handlers."""
    return _method("get_all_handlers")(handler)


def fetch_trace(handler: int) -> list[int]:
    """See Worker.fetch_trace."""
    return _method("fetch_trace")(handler)


def get_batch(
    timeout_ms: float | None = None, at_least: int | None = None
) -> list[tuple[int, list[Tensor], list[int]]]:
    """See Server.get_batch."""
    return _method("get_batch")(timeout_ms, at_least)


def worker_of(handler: int) -> int:
    """See Server.worker_of."""
    return _method("worker_of")(handler)


def respond(tensors: Sequence[Tensor], handler: int, need_event: bool = False) -> None:
    """As Server.respond, with what StepMesh's programs need.

    ``need_event`` is False unless it is given: GPU tensors are sent at once, whether or not the
    kernels that fill them have run. Their types are not compared with those of the pull tensors.
    """
    _method("respond")(tensors, handler, need_event)


def fail(handler: int, text: str) -> None:
    """See Server.fail."""
    _method("fail")(handler, text)


def respond_vec(
    ret_buffer: Tensor,
    tensors_vec: Sequence[Sequence[Tensor] | Tensor],
    handler_vec: Sequence[int],
) -> None:
    """As Server.respond_vec; types are not compared."""
    _method("respond_vec")(ret_buffer, tensors_vec, handler_vec)


def register_recv_buffer(
    tensor: Tensor, worker_ranks: Sequence[int], push_keys: Sequence[int]
) -> None:
    """See Server.register_recv_buffer."""
    _method("register_recv_buffer")(tensor, worker_ranks, push_keys)


def barrier(
    include_server: bool,
    include_client: bool,
    instance_barrier: bool = True,
    timeout_ms: float | None = None,
) -> None:
    """See Node.barrier."""
    _method("barrier")(include_server, include_client, instance_barrier, timeout_ms)


def links() -> list[Link]:
    """See Node.links."""
    if _node is None:
        raise ClosedError("links: there is no node: call init() first")
    return _node.links()


def get_nanosecond() -> int:
    """Now, by the clock of the traces (CLOCK_MONOTONIC), in nanoseconds."""
    return time.monotonic_ns()


class SimpleNotify(Notify):
    """Lets the current CUDA stream wait for a request or a batch; see :class:`Notify`."""

    def __init__(self) -> None:
        # init() puts others in the place of these functions.
        super().__init__(lambda handler: wait(handler), lambda: get_batch())


def map_pinned_tensor(tensor: Tensor, device_index: int) -> Tensor:
    """The memory of a pinned host tensor as a tensor of GPU ``device_index``, without a copy.

    It keeps the memory alive.

    Raises:
        ConfigError: the tensor is not contiguous or not on the CPU.
        Error: it is not pinned.
    """
    return _loader.load().map_pinned_tensor(tensor, device_index)


def write_flag(flag: Tensor, seq: Tensor) -> None:
    """Writes ``seq`` to ``flag`` on the current CUDA stream, after what is queued there.

    Both are one int64, on the GPU or in pinned memory, and at least one of them on the GPU. It can
    be captured into a CUDA graph. The memory of both is kept until the stream has passed, or as
    long as the graph, or what was made of it.

    Raises:
        ConfigError: a tensor of another kind, or on two GPUs.
    """
    _loader.load().write_flag(flag, seq)


def wait_flag(flag: Tensor, seq: Tensor, timeout_ms: float | None = None) -> None:
    """Makes the current CUDA stream wait until ``flag >= seq``; as :func:`write_flag`.

    The wait also ends, and the stream goes on without the flag, when the last node of this process
    is stopped or closed, and when the interpreter ends. That goes for waits that are enqueued
    already, and for those of graphs until a node is opened or this is called again. No peer
    is known to be behind a flag: the loss of one ends nothing.

    Args:
        timeout_ms: ends the wait so long after it has begun; None: it has no limit. In a graph it
            stays as it was captured.

    Raises:
        ConfigError: as :func:`write_flag`.
        TimeoutError: a wait before, of any stream, has lasted for its ``timeout_ms``. Nothing is
            enqueued; the next call is as if it had not been.
    """
    _loader.load().wait_flag(flag, seq, timeout_ms)


def seq_add_one(seq: Tensor) -> None:
    """Adds one to ``seq`` on the current CUDA stream; as :func:`write_flag`."""
    _loader.load().seq_add_one(seq)
