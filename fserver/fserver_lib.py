"""The functions of StepMesh's ``fserver_lib``, on one node that the environment describes.

``import fserver_lib``, ``import fserver`` and ``from fserver import fserver_lib`` give the same
functions. Importing does not load the engine: the first call that needs it does. The examples
below begin with ``import fserver_lib as f``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fserver._stepmesh import Fast, StepmeshServer, StepmeshWorker
from fserver.errors import ClosedError, ConfigError, Error
from fserver.flags import map_pinned_tensor, seq_add_one, wait_flag, write_flag
from fserver.link import Link
from fserver.node import Node, Scheduler
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


_FOREVER = 1e12  # milliseconds. The loss of a server and stop() end a wait

_node: Node | None = None


def init() -> None:
    """Opens the node of this process and returns when the whole cluster is connected.

    The environment describes the node: DMLC_ROLE (default ``server``) and the settings that
    ``fserver env`` prints. The node's GPU becomes torch's current device in the calling thread.
    With DMLC_ROLE=joint this process becomes ``fserver run``, which starts scheduler, servers and
    workers of this host, each with the command line of this process.

    Raises:
        ConfigError: a setting is wrong. The text has its name, its value and what is allowed.
        TimeoutError: the cluster was not complete within FSERVER_INIT_TIMEOUT seconds.
        Error: the node is open already.

    Example:
        ```python
        f.init()
        ...  # push_pull and wait on a worker, get_batch and respond on a server
        f.stop()
        ```
    """
    global _node
    if _node is not None and not _node.closed:
        raise Error("init: the node is open already: call stop() before the next init()")
    role = os.environ.get("DMLC_ROLE", "").strip().lower() or "server"
    if role == "joint":
        from fserver.run.joint import become_launcher

        become_launcher()
    classes: dict[str, type[Node]]
    classes = {"worker": StepmeshWorker, "server": StepmeshServer, "scheduler": Scheduler}
    if role not in classes:
        raise ConfigError(
            f"DMLC_ROLE={os.environ['DMLC_ROLE']!r}: want worker, server, scheduler or joint"
        )
    node = classes[role].from_env()
    if isinstance(node, StepmeshWorker | StepmeshServer) and node.device != "cpu":
        import torch

        try:
            torch.cuda.set_device(node.device)
        except BaseException:  # or the peers would wait for a member that does nothing
            node.close()
            raise
    _node = node
    _fast.bind(_node)


def stop() -> None:
    """Leaves the cluster together with all other nodes and closes the node.

    Waits until the others stop too, at most FSERVER_STOP_TIMEOUT seconds. Does nothing if no node
    is open. ``finalize`` is another name of this function.

    Raises:
        PeerLostError: another node was lost instead of stopping. This one is closed.
        TimeoutError: the others did not stop in time. This one is closed.

    Example:
        ```python
        f.init()
        work()
        f.stop()
        ```
    """
    global _node
    node = _node
    if node is None:
        return
    try:
        node.stop()
    finally:
        if node.closed and _node is node:
            if isinstance(node, StepmeshWorker):
                StepmeshWorker.next_handler = node._node.next_handler
            _fast.unbind()
            _node = None


finalize = stop


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
    """Sends P tensors to every server and lets every server write Q answers.

    Returns at once. The tensors are kept alive until the request has completed. Until then, do not
    change the pushed tensors and do not read the pulled ones. All tensors are contiguous, of any
    dtype and shape, on the CPU or, with STEPMESH_BACKEND=GPU, on the node's GPU.

    Unlike ``fserver.Worker``, and as StepMesh does, this function accepts a pull tensor that
    belongs to an open push_pull (later answers are written over earlier ones) and answers of any
    dtype (their bytes are written as they are).

    Args:
        push_tensors: P tensors. Shapes may change from call to call.
        push_keys: P distinct ints of 0 to 2**64-1: the names of the tensors at the server. A key
            that is pushed again waits until the server has answered its last push.
        pull_tensors: ``servers * Q`` tensors. ``pull_tensors[i * Q + j]`` takes answer j of server
            i.
        pull_keys: a key for each pull tensor, or one for each of the Q positions.
        need_event: on a node with a GPU, send after what is queued on the current stream. False:
            send at once, because the pushed tensors are filled already.

    Returns:
        The handler of the request, a plain int: the first of ``P + Q`` ints that belong
        to the request. Handlers are counted from 0 in this process.

    Raises:
        ConfigError: an argument has the wrong type, device or value.
        ShapeError: counts do not fit, or a tensor is not contiguous.
        LimitError: 4,096 push_pulls have not completed. Wait for one of them first.
        ClosedError: there is no open node.

    Example:
        ```python
        x, y = torch.ones(4, 8), torch.empty(4, 8)
        handler = f.push_pull([x], [0], [y], [1])
        f.wait(handler)  # y has the server's answer
        ```
    """
    return int(_method("push_pull")(push_tensors, push_keys, pull_tensors, pull_keys, need_event))


def wait(handler: int, timeout_ms: float = 10000) -> None:
    """Returns when all answers of a push_pull have been written.

    Args:
        handler: what ``push_pull`` returned, or any of the ints that belong to the request. A
            request may be waited for again.
        timeout_ms: limit in milliseconds. As in StepMesh it counts from the push_pull. If that was
            longer ago, the function only looks.

    Raises:
        TimeoutError: the limit is over. The request goes on, and the handler stays valid.
        PeerLostError: a server is gone.
        RefusedError, ShapeError: a server has refused the request (``fail``), or a tensor of it.
        ConfigError: the handler is unknown. The last 4,096 requests are remembered.

    Example:
        ```python
        handler = f.push_pull([x], [0], [y], [1])
        f.wait(handler, timeout_ms=1000)
        ```
    """
    _method("wait")(handler, timeout_ms)


def get_all_handlers(handler: int) -> list[int]:
    """Returns all ints that belong to a request: one for each pushed and each pull tensor.

    Args:
        handler: what ``push_pull`` returned, or any of the ints that belong to the request.

    Raises:
        ConfigError: the handler is unknown. The last 4,096 requests are remembered.

    Example:
        ```python
        handler = f.push_pull([x], [0], [y], [1])
        assert f.get_all_handlers(handler) == [handler, handler + 1]
        ```
    """
    return list(_method("get_all_handlers")(handler))


def fetch_trace(handler: int) -> list[int]:
    """Returns the eight time stamps of a completed request, in nanoseconds.

    Args:
        handler: what ``push_pull`` returned.

    Returns:
        Request started (0), posted (1), received by the server (2), handed to its application (3),
        answer started (4), posted (5), received by the worker (6), completed (7). Stamps 2 to 5 are
        by the server's clock, so the time in the network is ``(t[6] - t[1]) - (t[5] - t[2])``.

    Raises:
        ShapeError: the request has not completed.
        ConfigError: the handler is unknown.

    Example:
        ```python
        f.wait(handler)
        t = f.fetch_trace(handler)
        print((t[7] - t[0]) / 1e3, "us in all")
        ```
    """
    return list(_method("fetch_trace")(handler))


def get_batch(
    timeout_ms: float | None = None, at_least: int | None = None
) -> list[tuple[int, list[Tensor], list[int]]]:
    """Takes one request of each worker group, and waits until there is one of each.

    Args:
        timeout_ms: limit in milliseconds; None: no limit.
        at_least: 1 to the number of worker groups: return as soon as so many groups have a request,
            with one request of each group that has one. None: wait for all groups.

    Returns:
        A list of ``(handler, tensors, keys)`` in the order of the worker ranks; an empty list if
        the limit is over. Each handler is for one ``respond`` or ``fail``. The tensors are views of
        the receive buffers: each is valid until the next push of its key by that worker arrives,
        which is not before the answer.

    Raises:
        ClosedError: workers have left, so that there will be no such batch. Call ``stop()``.
        PeerLostError: a worker is gone, and no other process has taken its rank.
        ShapeError: at_least is more than there are worker groups.
        ConfigError: at_least or timeout_ms is not a number, or at_least is 0.

    Example:
        ```python
        for handler, tensors, keys in f.get_batch():
            f.respond([tensors[0] * 2], handler)
        ```
    """
    return list(_method("get_batch")(timeout_ms, at_least))


def worker_of(handler: int) -> int:
    """Returns the rank of the worker that has sent a request.

    Args:
        handler: of ``get_batch``, not answered yet.

    Raises:
        ShapeError: no request with this handler waits for an answer.

    Example:
        ```python
        for handler, tensors, keys in f.get_batch(at_least=1):
            print("a request of worker", f.worker_of(handler))
            f.respond([tensors[0]], handler)
        ```
    """
    return int(_method("worker_of")(handler))


def respond(tensors: Sequence[Tensor], handler: int, need_event: bool = False) -> None:
    """Answers a request, once.

    Returns at once. The tensors are kept alive until they have been sent. Do not change them before
    the worker's next request has come.

    Unlike ``fserver.Server``, and as StepMesh does, this function sends GPU tensors at once unless
    need_event is True, and does not compare dtypes with those of the pull tensors.

    Args:
        tensors: Q contiguous tensors, in the order of the worker's pull tensors, each with as many
            bytes. Empty for a request that pulls nothing.
        handler: of ``get_batch``.
        need_event: on a node with a GPU, send after what is queued on the current stream, so
            after the kernels that fill them. False: send at once.

    Raises:
        ShapeError: count or sizes do not fit, or the handler does not wait for an answer.
        LimitError: 4,096 answers have not left this server. Call again later.
        PeerLostError: the worker is gone.

    Example:
        ```python
        for handler, tensors, keys in f.get_batch():
            f.respond([model(tensors[0])], handler, need_event=True)
        ```
    """
    _method("respond")(tensors, handler, need_event)


def fail(handler: int, text: str) -> None:
    """Refuses a request. At its worker, ``wait`` raises RefusedError with the text.

    It takes the place of ``respond``: afterwards the tensors of the request are not valid any more.

    Args:
        handler: of ``get_batch``.
        text: the reason. The first 500 bytes of its UTF-8 travel. A run of white space becomes one
            space.

    Raises:
        ShapeError: the handler does not wait for an answer.
        ConfigError: text is not a str.
        PeerLostError: the worker is gone.

    Example:
        ```python
        for handler, tensors, keys in f.get_batch():
            if tensors[0].shape[1] != hidden:
                f.fail(handler, f"want rows of {hidden}")
        ```
    """
    _method("fail")(handler, text)


def respond_vec(
    ret_buffer: Tensor,
    tensors_vec: Sequence[Sequence[Tensor] | Tensor],
    handler_vec: Sequence[int],
) -> None:
    """Answers several requests of one pull tensor each with the rows of one tensor.

    A tensor on the GPU is sent after what is queued on the current stream. As in StepMesh, dtypes
    are not compared with those of the pull tensors.

    Args:
        ret_buffer: a contiguous tensor with at least one dimension. Handler k gets the rows behind
            those of handlers 0 to k-1, as many as ``tensors_vec[k]`` has. If it has too few rows
            for all, every handler gets the rows from 0 on.
        tensors_vec: for each request a list of tensors, of which the first counts, or a tensor.
        handler_vec: as many handlers of ``get_batch``.

    Raises:
        ShapeError: counts or sizes do not fit. The requests before the bad one have been answered.

    Example:
        ```python
        batch = f.get_batch()
        rows = torch.cat([tensors[0] for _, tensors, _ in batch])
        f.respond_vec(model(rows), [t for _, t, _ in batch], [h for h, _, _ in batch])
        ```
    """
    _method("respond_vec")(ret_buffer, tensors_vec, handler_vec)


def register_recv_buffer(
    tensor: Tensor, worker_ranks: Sequence[int], push_keys: Sequence[int]
) -> None:
    """Receives pushed tensors in memory of the caller's.

    Call it before the first push of these keys; a barrier of all nodes after it makes sure of that.

    Args:
        tensor: a contiguous tensor, kept until the node is closed. It is cut into
            ``len(worker_ranks)`` slices of equal bytes.
        worker_ranks: slice i receives from worker group ``worker_ranks[i]``: from its worker on
            this server's rail. A rank may repeat.
        push_keys: slice i receives key ``push_keys[i]``. The keys of one rank are distinct.

    Raises:
        ShapeError: the bytes do not divide, counts differ, there is no such worker, or a key has
            been pushed or has memory already. Nothing is registered then.
        ConfigError: the tensor cannot be written to, or shares memory with a registered one.

    Example:
        ```python
        rows = torch.empty(2, 128, 512)
        f.register_recv_buffer(rows, [0, 1], [0, 0])  # key 0 of workers 0 and 1
        f.barrier(True, True)
        ```
    """
    _method("register_recv_buffer")(tensor, worker_ranks, push_keys)


def barrier(
    include_server: bool,
    include_client: bool,
    instance_barrier: bool = True,
    timeout_ms: float | None = None,
) -> None:
    """Waits until every node of the named roles has called it.

    Args:
        include_server: servers take part.
        include_client: workers take part.
        instance_barrier: True: every instance calls it. False: one instance of each group does.
        timeout_ms: limit in milliseconds; None: FSERVER_BARRIER_TIMEOUT.

    Raises:
        TimeoutError: not all nodes called it in time.
        PeerLostError: any node of the cluster, or the scheduler, is gone.

    Example:
        ```python
        f.barrier(True, True)  # all servers and workers
        ```
    """
    _method("barrier")(include_server, include_client, instance_barrier, timeout_ms)


def links() -> list[Link]:
    """Returns one ``Link`` (role, rank, remote, transport, reason) for each connected peer.

    Raises:
        ClosedError: there is no open node.

    Example:
        ```python
        for link in f.links():
            print(link.role, link.rank, link.transport, link.reason)
        ```
    """
    if _node is None:
        raise ClosedError("links: there is no node: call init() first")
    return _node.links()


def get_nanosecond() -> int:
    """Returns the time by the clock of the traces (CLOCK_MONOTONIC), in nanoseconds.

    Example:
        ```python
        start = f.get_nanosecond()
        print((f.get_nanosecond() - start) / 1e3, "us")
        ```
    """
    return time.monotonic_ns()


class SimpleNotify(Notify):
    """Lets the current CUDA stream wait for a request or a batch, without blocking the caller.

    Example:
        ```python
        notify = f.SimpleNotify()
        notify.init()
        handler = f.push_pull([x], [0], [y], [1])
        notify.stream_wait_event(handler)  # kernels enqueued from here on find the answer in y
        notify.wait_event_done()
        ```
    """

    def __init__(self) -> None:  # init() puts others in the place of these functions
        super().__init__(lambda handler: wait(handler, _FOREVER), lambda: get_batch())


_fast = Fast(vars(sys.modules[name]) for name in ("fserver", __name__))
