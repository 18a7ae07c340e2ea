"""Python tracebacks among the lines that a process prints on standard error."""

import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

BEGIN = b"Traceback (most recent call last):"
LOST = "fserver.errors.PeerLostError"
MOST = 500  # characters of a message that are shown
_LINKS = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
_FRAME = re.compile(r'  File "([^"]+)", line (\d+)')
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = (_PACKAGE, sysconfig.get_path("stdlib"), "<")


class Raised(NamedTuple):
    """An exception that ended a process."""

    text: str
    """The exception as Python prints it: "KeyError: 'x'"."""
    lost: str
    """A lost peer is the cause: the PeerLostError that this is, or was raised from. Else empty."""
    place: str
    """The innermost line of the user's program: "train.py, line 12"."""

    @property
    def interrupted(self) -> bool:
        """It was Ctrl-C."""
        return self.text == "KeyboardInterrupt"


def split(lines: Sequence[bytes]) -> tuple[Raised | None, list[bytes]]:
    """Returns the exception of the last traceback, and the lines that belong to no traceback."""
    exceptions: list[str] = []
    frames: list[tuple[str, str]] = []
    others: list[bytes] = []
    inside = False
    for line in lines:
        if line == BEGIN:
            inside, frames = True, []
        elif inside and line.startswith(b" "):
            frames += _FRAME.findall(line.decode(errors="replace"))
        elif inside and line:
            inside = False
            exceptions.append(line.decode(errors="replace"))
        elif line and line not in _LINKS:
            others.append(line)
    if not exceptions:
        return None, others
    lost = next((text for text in exceptions if text.startswith(LOST)), "")
    return Raised(exceptions[-1][:MOST], lost, _place(frames)), others


def _place(frames: list[tuple[str, str]]) -> str:
    own = [f for f in frames if not f[0].startswith(_LIBRARIES) and "-packages/" not in f[0]]
    for path, number in (own or frames)[-1:]:
        return f"{Path(path).name}, line {number}"
    return ""
