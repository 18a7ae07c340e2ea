"""The nodes of fserver_lib, which keep to StepMesh."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from fserver.node import Node
from fserver.server import Server
from fserver.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor

    from fserver import _C


class StepmeshWorker(Worker):
    """Goes on counting handlers where the worker before it has stopped."""

    next_handler: ClassVar[int] = 0

    def _make(self, extension: ModuleType, lines: list[str]) -> _C.Worker:
        node: _C.Worker = extension.StepmeshWorker(lines, self.next_handler)
        return node


class StepmeshServer(Server):
    """As Server, but respond does not wait for the current stream by default, and ranks of
    register_recv_buffer are of worker groups."""

    def _open(self, settings: dict[str, str]) -> None:
        super()._open(settings)
        self._group_size = int(settings.get("DMLC_GROUP_SIZE", "").strip() or 1)

    def _make(self, extension: ModuleType, lines: list[str]) -> _C.Server:
        node: _C.Server = extension.StepmeshServer(lines)
        return node

    def _rank(self, group: int) -> int:
        """Returns the rank of the worker of a group. What is no group stays as it is."""
        if isinstance(group, bool) or operator.index(group) < 0:
            return group
        return operator.index(group) * self._group_size + self.instance

    def register_recv_buffer(
        self, tensor: Tensor, worker_ranks: Sequence[int], push_keys: Sequence[int]
    ) -> None:
        with contextlib.suppress(TypeError):  # which the method says in its own words
            worker_ranks = [self._rank(group) for group in worker_ranks]
        super().register_recv_buffer(tensor, worker_ranks, push_keys)


class Fast:
    """Puts the methods of the extension in the place of functions with their names, where callers
    look them up at each call. Saves two frames of Python, 0.15 us a call. What callers have put
    there themselves stays.

    Args:
        spaces: the namespaces that have the functions.
    """

    def __init__(self, spaces: Iterable[dict[str, Any]]) -> None:
        self._spaces = list(spaces)
        names = {*StepmeshWorker._methods, *StepmeshServer._methods}
        self._functions = {name: self._spaces[-1][name] for name in names}
        self._methods: dict[str, Any] = {}  # that are in their place

    def bind(self, node: Node) -> None:
        self.unbind()
        for name in node._methods:
            self._methods[name] = getattr(node, name)
            self._replace(name, self._functions[name], self._methods[name])

    def unbind(self) -> None:
        while self._methods:
            name, method = self._methods.popitem()
            self._replace(name, method, self._functions[name])

    def _replace(self, name: str, old: Any, new: Any) -> None:
        for space in self._spaces:
            if (there := space.get(name)) is old or _of_a_closed_node(there):
                space[name] = new


def _of_a_closed_node(method: object) -> bool:
    """Reports whether a method belongs to a node that is closed. A caller had put a function in its
    place, and has put it back too late."""
    node: Any = getattr(method, "__self__", None)
    return type(node).__module__ in (__name__, "fserver._C") and bool(node.closed)
