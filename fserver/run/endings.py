"""How the processes of a run ended: which one is the cause, and what is said of the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from . import tracebacks
from .children import Child

KILLED = "if you did not kill it, the host may have run out of memory (see dmesg)"


def cause(failed: Sequence[Child]) -> Child:
    """Returns the failure that explains the others: the first one that a lost peer does not
    explain, and that is no silent end with status 1, which may be the loss of a peer too. Of
    several with the same error it is the one whose traceback has been printed."""
    return min(failed, key=lambda child: (_doubt(child), child.error.held_since is not None))


def likelier(child: Child, than: Child) -> bool:
    """Reports whether a process that has not ended yet has printed a likelier cause, or is the
    peer that the other one has lost: it may take seconds from the end of its node to its own."""
    if child.raised is None and than.raised is not None and than.raised.lost:
        return re.search(rf"\b{child.name}\b", than.raised.lost) is not None
    return child.raised is not None and _doubt(child) < _doubt(than)


def _doubt(child: Child) -> int:
    if child.raised is not None:
        return 2 if child.raised.lost else 0
    return 1 if child.status == 1 else 0


def explained(child: Child, cause: Child | None, passed_on: int | None) -> bool:
    """Reports whether the traceback of a process says nothing new: it lost a peer, it raised what
    the cause raised, or it was interrupted."""
    raised = child.raised
    if raised is None or not child.status:
        return False
    if passed_on == signal.SIGINT and raised.interrupted:
        return True
    if cause is None:
        return bool(raised.lost) and passed_on is not None
    return bool(raised.lost) or (cause.raised is not None and raised.text == cause.raised.text)


def sentence(child: Child) -> str:
    """Returns "worker 0 (pid 12) failed with status 1: KeyError: 'x'"."""
    text = f"{child.name} (pid {child.pid}) {_how(child.status or 0)}"
    if child.raised is not None:
        return f"{text}: {child.raised.text}"
    if child.status == 128 + signal.SIGKILL:
        return f"{text}: {KILLED}"
    return f"{text}: its last line of standard error is: {child.last}" if child.last else text


def others(children: Sequence[Child]) -> list[str]:
    """Returns a line for each way in which processes ended that are not the cause."""
    lines = []
    alike: dict[tracebacks.Raised, list[str]] = {}
    for child in children:
        if not child.status:
            continue
        if child.raised is not None:
            alike.setdefault(child.raised, []).append(child.name)
        elif not child.told:
            lines.append(sentence(child))
    for raised, names in alike.items():
        place = f" ({raised.place})" if raised.place else ""
        lines.append(f"{', '.join(names)} ended with {raised.text}{place}")
    return lines


def _how(status: int) -> str:
    if status <= 128:
        return f"failed with status {status}"
    try:
        return f"was killed by {signal.Signals(status - 128).name}"
    except ValueError:
        return f"failed with status {status}"
