"""Communication for serving large models with attention and FFN on separate machines.

Objects: ``Worker``, ``Server``, ``Scheduler``. The functions of StepMesh's ``fserver_lib`` work
on one node of the process, which the environment describes. Importing loads no engine: the
first node does. It does not import torch either: the first worker or server does. Once both have
been imported, in any order, ``torch.ops.fserver`` has its operators.

``from fserver import *`` gives the classes, the errors and the functions that make tensors, and
shadows no builtin: ``fserver.Error``, ``fserver.TimeoutError`` and StepMesh's functions
(``fserver.wait``) are used by their full names.
"""

from types import ModuleType

from fserver import _loader
from fserver import fserver_lib as fserver_lib
from fserver._after_torch import after_torch as _after_torch_import
from fserver.errors import (
    ClosedError,
    ConfigError,
    LimitError,
    PeerLostError,
    RefusedError,
    ShapeError,
)
from fserver.errors import Error as Error
from fserver.errors import TimeoutError as TimeoutError
from fserver.fserver_lib import SimpleNotify
from fserver.fserver_lib import barrier as barrier
from fserver.fserver_lib import fail as fail
from fserver.fserver_lib import fetch_trace as fetch_trace
from fserver.fserver_lib import finalize as finalize
from fserver.fserver_lib import get_all_handlers as get_all_handlers
from fserver.fserver_lib import get_batch as get_batch
from fserver.fserver_lib import get_nanosecond as get_nanosecond
from fserver.fserver_lib import init as init
from fserver.fserver_lib import links as links
from fserver.fserver_lib import map_pinned_tensor as map_pinned_tensor
from fserver.fserver_lib import push_pull as push_pull
from fserver.fserver_lib import register_recv_buffer as register_recv_buffer
from fserver.fserver_lib import respond as respond
from fserver.fserver_lib import respond_vec as respond_vec
from fserver.fserver_lib import seq_add_one as seq_add_one
from fserver.fserver_lib import stop as stop
from fserver.fserver_lib import wait as wait
from fserver.fserver_lib import wait_flag as wait_flag
from fserver.fserver_lib import worker_of as worker_of
from fserver.fserver_lib import write_flag as write_flag
from fserver.handle import Handle
from fserver.link import Link, LinkMember
from fserver.memory import empty_shared, shared_like
from fserver.node import Node, Scheduler
from fserver.server import Server
from fserver.worker import Worker

__version__ = "0.1.0"  # engine/node has the same

__all__ = [
    "ClosedError",
    "ConfigError",
    "Handle",
    "LimitError",
    "Link",
    "LinkMember",
    "Node",
    "PeerLostError",
    "RefusedError",
    "Scheduler",
    "Server",
    "ShapeError",
    "SimpleNotify",
    "Worker",
    "empty_shared",
    "shared_like",
]


def _define_operators(torch: ModuleType) -> None:
    from fserver.channel import ops

    try:
        ops.define(torch)
    except Exception as error:
        raise _loader.unusable(torch, error) from None


_after_torch_import(_define_operators)
