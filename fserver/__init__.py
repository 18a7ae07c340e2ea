"""Communication for serving large models with attention and FFN on separate machines.

Objects: ``Worker``, ``Server``, ``Scheduler``. The functions of StepMesh's ``fserver_lib`` work
on one node of the process, which the environment describes. Importing loads no engine: the
first node does. It does not import torch either. Once both have been imported, in any order,
``torch.ops.fserver`` has its operators.
"""

from types import ModuleType

from fserver import fserver_lib
from fserver._after_torch import after_torch
from fserver.api import Link, Node, Scheduler, Server, Worker
from fserver.errors import (
    ClosedError,
    ConfigError,
    Error,
    LimitError,
    PeerLostError,
    RefusedError,
    ShapeError,
    TimeoutError,
)
from fserver.fserver_lib import (
    SimpleNotify,
    barrier,
    fail,
    fetch_trace,
    finalize,
    get_all_handlers,
    get_batch,
    get_nanosecond,
    init,
    links,
    map_pinned_tensor,
    push_pull,
    register_recv_buffer,
    respond,
    respond_vec,
    seq_add_one,
    stop,
    wait,
    wait_flag,
    worker_of,
    write_flag,
)
from fserver.handle import Handle
from fserver.memory import empty_shared, shared_like

__version__ = "0.1.0"  # engine/node has the same

__all__ = [
    "ClosedError",
    "ConfigError",
    "Error",
    "Handle",
    "LimitError",
    "Link",
    "Node",
    "PeerLostError",
    "RefusedError",
    "Scheduler",
    "Server",
    "ShapeError",
    "SimpleNotify",
    "TimeoutError",
    "Worker",
    "barrier",
    "empty_shared",
    "fail",
    "fetch_trace",
    "finalize",
    "fserver_lib",
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
    "shared_like",
    "stop",
    "wait",
    "wait_flag",
    "worker_of",
    "write_flag",
]


def _define_operators(torch: ModuleType) -> None:
    from fserver.channel import ops

    ops.define(torch)


after_torch(_define_operators)
