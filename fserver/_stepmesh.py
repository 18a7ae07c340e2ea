"""The nodes of fserver_lib, which keep to StepMesh."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from fserver.server import Server
from fserver.worker import Worker

if TYPE_CHECKING:
    from fserver import _C


class StepmeshWorker(Worker):
    """Goes on counting handlers where the worker before it has stopped."""

    next_handler: ClassVar[int] = 0

    def _make(self, extension: ModuleType, lines: list[str]) -> _C.Worker:
        node: _C.Worker = extension.StepmeshWorker(lines, self.next_handler)
        return node


class StepmeshServer(Server):
    """As Server, but respond does not wait for the current stream by default."""

    def _make(self, extension: ModuleType, lines: list[str]) -> _C.Server:
        node: _C.Server = extension.StepmeshServer(lines)
        return node
