"""Worker: the node that pushes tensors and pulls answers."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, cast

from fserver.handle import Handle, handles_of
from fserver.node import Node

if TYPE_CHECKING:
    from torch import Tensor

    from fserver import _C
    from fserver.channel import Channel

__all__ = ["Worker"]


class Worker(Node):
    """A node that pushes tensors to all servers and pulls their answers.

    It takes the arguments of ``Node``.

    Example:
        ```python
        with fserver.Worker(scheduler="10.0.0.1:7000") as worker:
            handle = worker.push_pull([x], [0], [y], [0])
            handle.wait(timeout_ms=1000)
        ```
    """

    _node: _C.Worker
    _role = "worker"
    _methods = ("barrier", "push_pull", "wait", "get_all_handlers", "fetch_trace")

    def push_pull(
        self,
        push_tensors: Sequence[Tensor],
        push_keys: Sequence[int],
        pull_tensors: Sequence[Tensor],
        pull_keys: Sequence[int],
        need_event: bool = True,
    ) -> Handle:
        """Sends P tensors to every server and lets every server write Q answers.

        Returns at once. A lost server is no error here: ``wait`` raises it.

        The tensors are kept alive until the request has completed. Until then:

        - Do not change the pushed tensors, and do not read the pulled ones.
        - A pull tensor belongs to the request, whether or not the request has been waited for.
          After an error of one server, another may still answer. Until it has, another request may
          take the tensor only if it pushes under the first push key of this one, and so comes
          behind it.
        - do not call ``share_memory_()`` on any of the tensors, or send it to another process with
          torch.multiprocessing: torch gives it other memory, and frees that which is in use.
        - torch refuses to resize any of the tensors. A tensor whose ``resize_`` torch has refused
          has the new shape over the old memory all the same: resize it back.

        All tensors are contiguous, of any dtype and shape, also without rows or dimensions. They
        are on the CPU or, with backend GPU, on the node's GPU; the peers' tensors may be on either.

        Args:
            push_tensors: P tensors. Shapes may change from call to call.
            push_keys: P distinct ints of 0 to 2**64-1: the names of the tensors at the server. A
                key that is pushed again waits until the server has answered its last push.
            pull_tensors: ``servers * Q`` tensors. ``pull_tensors[i * Q + j]`` takes answer j of
                server i.
            pull_keys: a key for each pull tensor, or one for each of the Q positions.
            need_event: on a node with a GPU, send after what is queued on the current stream.
                False: send at once, because the pushed tensors are filled already and nothing that
                is queued uses the pull tensors.

        Returns:
            The handle of the request: an int, the first of ``P + servers * Q`` that belong to the
            request, counted from 0. It has ``wait()`` and ``done()`` and can be awaited.

        Raises:
            ConfigError: an argument has the wrong type, device or value, or a pull tensor shares
                memory with one of another request. The text has the handle of that request.
            ShapeError: counts do not fit, a tensor is not contiguous, or the description of all
                tensors (about 10 bytes each, and up to 9 for each dimension) is larger than a
                frame, 1 MiB.
            LimitError: 4,096 push_pulls of this worker have not completed. Wait for one of them,
                then call again.
        """
        handler = self._node.push_pull(push_tensors, push_keys, pull_tensors, pull_keys, need_event)
        return cast(Handle, handler)  # the class that _make has given to the extension

    def wait(self, handler: int, timeout_ms: float = 10000) -> None:
        """Returns when all answers of a push_pull have been written.

        Args:
            handler: what ``push_pull`` returned, or any int that belongs to the request. A request
                may be waited for again.
            timeout_ms: limit in milliseconds, counted from this call. 0: only look.

        Raises:
            TimeoutError: the limit is over. The request goes on, and the handle stays valid. The
                text names the server that has not answered, the key, and, if there is one, the
                earlier request that this one waits for: the requests of a worker go to a server in
                the order of the calls, and a key that is pushed again waits for the answer to its
                last push.
            PeerLostError: a server is gone. Every later wait for this handle raises it too. New
                push_pulls succeed when another process has taken the server's rank.
            RefusedError: a server's application has refused the request (``Server.fail``). The
                error has its text.
            ShapeError: a server cannot take a pushed tensor: it is larger than what the server has
                registered for its key, the server's torch has no such dtype, the server has no
                memory for it, or there are too many keys. Other requests are not touched.
            Error: this process lacks memory or descriptors for the request; the text says which.
                The connection is made anew.
            ConfigError: the handle is unknown. The last 4,096 requests are remembered.
        """
        self._node.wait(handler, timeout_ms)

    def channel(
        self,
        push: Sequence[Tensor],
        push_keys: Sequence[int],
        pull: Sequence[Tensor],
        pull_keys: Sequence[int],
        *,
        mode: str = "kernel",
        name: str | None = None,
        timeout_ms: float = 30000,
        tune: bool = False,
    ) -> Channel:
        """Opens a stream channel with all servers, each of which calls ``channel`` too.

        ``send()`` sends the push tensors to every server; ``recv()`` fills the pull tensors with
        their answers. Both enqueue on the current stream and can be captured in a CUDA graph. The
        channel keeps the tensors alive.

        Args:
            push: P contiguous tensors. All tensors of a channel are on one device: the CPU or the
                node's GPU (any GPU if the node's backend is CPU).
            push_keys: P distinct ints that no other open channel of this worker has.
            pull: ``servers * Q`` tensors. ``pull[i * Q + j]`` takes tensor j of server i.
            pull_keys: a key for each pull tensor, or one for each of the Q positions.
            mode: how GPUs that reach each other's memory send. ``"kernel"``, by small kernels, has
                the lowest latency. ``"copy"``, by the copy engines, uses no SM. ``"host"`` goes
                through host memory and the engine, over any transport. CPU tensors always go
                through the engine. The former names ``"sm"``, ``"ce"`` and ``"proxy"`` work too.
            name: what both sides call the channel, 1 to 64 bytes of UTF-8. None: unnamed channels
                are numbered in the order in which they are opened. A failed open frees its number.
            timeout_ms: limit of opening, and of each wait on a stream, in milliseconds.
            tune: with mode ``"kernel"``: measure whether packets or flags are faster, and how many
                blocks copy fastest. That takes about a second, and as much memory again meanwhile.
                Set it on all sides or on none, with a name of at most 61 bytes. False: use what was
                measured on H200. ``Channel.table`` says what was chosen.

        Returns:
            The channel, open on all sides.

        Raises:
            ConfigError: an argument is wrong, or the sides differ; the text says where. Or the
                current stream is being captured into a graph: open the channel before that.
            ShapeError: counts or shapes are wrong, or the sides differ.
            TimeoutError: a server has not opened its side in time.
            PeerLostError: a server is gone.
        """
        from fserver.channel.channel import How
        from fserver.channel.describe import mode_named

        opener = self._opener()
        with opener.called(name) as called:
            how = How(mode_named(mode), called, timeout_ms, tune)
            return opener.worker(push, push_keys, pull, pull_keys, how)

    def _make(self, extension: ModuleType, lines: list[str]) -> _C.Worker:
        from fserver.aio import Loops

        node: _C.Worker = extension.Worker(lines)
        node.give_handles(handles_of(Loops(node)))
        return node

    _peers = "server"

    def _count(self) -> int:
        return self.servers

    def get_all_handlers(self, handler: int) -> list[int]:
        """Returns all ints that belong to a request: one for each pushed tensor and each pull
        tensor.

        Args:
            handler: what ``push_pull`` returned, or any int that belongs to the request.

        Raises:
            ConfigError: the handle is unknown. The last 4,096 requests are remembered.
        """
        return self._node.get_all_handlers(handler)

    def fetch_trace(self, handler: int) -> list[int]:
        """Returns the eight time stamps of a completed request, in nanoseconds.

        Args:
            handler: what ``push_pull`` returned.

        Returns:
            Request started (0), posted (1), received by the server (2), handed to its application
            (3), answer started (4), posted (5), received by the worker (6), completed (7). Stamps 2
            to 5 are by the server's clock, so the time in the network is ``(t[6] - t[1]) - (t[5] -
            t[2])``.

        Raises:
            ShapeError: the request has not completed.
            ConfigError: the handle is unknown. The last 4,096 requests are remembered.
        """
        return self._node.fetch_trace(handler)
