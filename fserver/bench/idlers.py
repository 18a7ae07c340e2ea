"""Worker groups that are connected and do nothing, for `fserver bench fanin --idle`.

The servers of that benchmark take the requests that there are, with get_batch(at_least=1).
"""

from .crew import Case
from .peers import Part, ServerPart
from .turns import CrewPlayer, Figures


class IdlersPlayer(CrewPlayer):
    """A crew whose first member is the worker that is measured."""

    def measure(self, warmup: int, count: int) -> Figures:
        return self._crew.workers("measure", warmup, count)[0]


class IdlersPart(Part):
    """The groups that do nothing."""

    def prepare(self, case: Case) -> None: ...

    def verify(self, seed: int) -> None: ...

    def measure(self, warmup: int, count: int) -> None: ...


class EagerServerPart(ServerPart):
    """A server that waits for no group in particular."""

    at_least = 1
