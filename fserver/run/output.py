"""Output of several processes on one screen or in one log.

Every line gets the name of its process. Lines are never mixed, and a line is
what a terminal would show when it ends: of a progress bar, which redraws its
line with \\r, that is the last state. On a terminal the bar that moved last is
also shown while it moves, below everything else.
"""

import os
import select
import shutil

LIMIT = 1 << 16  # a longer line is cut, so that nothing grows without bound
ERASE = b"\r\x1b[K"
COLOURS = (36, 33, 35, 32, 34, 31)


class Screen:
    """Where the lines go: file descriptors 1 and 2, which may be one terminal."""

    def __init__(self) -> None:
        self.tty = {fd: os.isatty(fd) for fd in (1, 2)}
        self._bar = False  # a progress bar stands in the last line

    def stream(self, fd: int, name: str, number: int) -> "Stream":
        """A stream of the process called name, to fd; number chooses the colour."""
        prefix = f"[{name}] "
        width = len(prefix)
        if self.tty[fd] and not os.environ.get("NO_COLOR"):
            prefix = f"\x1b[{COLOURS[number % len(COLOURS)]}m{prefix}\x1b[0m"
        return Stream(self, fd, prefix.encode(), width)

    def say(self, text: str) -> None:
        """A line of the launcher's own, on standard error."""
        self.lines(2, [f"fserver run: {text}".encode()])

    def lines(self, fd: int, lines: list[bytes]) -> None:
        erase = self._bar and self.tty[fd]
        if erase:
            self._bar = False
        write(fd, (ERASE if erase else b"") + b"".join(line + b"\n" for line in lines))

    def bar(self, fd: int, text: bytes) -> None:
        if self.tty[fd]:
            self._bar = True
            write(fd, ERASE + text)

    def close(self) -> None:
        """Leaves the cursor at the start of an empty line."""
        if self._bar:
            self.lines(1 if self.tty[1] else 2, [])


class Stream:
    """One output of one process, cut into lines."""

    def __init__(self, screen: Screen, fd: int, prefix: bytes, width: int) -> None:
        self._screen, self._fd, self._prefix, self._width = screen, fd, prefix, width
        self._rest = b""  # the line that has not ended yet

    def feed(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        if len(rest) > LIMIT:
            lines.append(rest)
            rest = b""
        if lines:
            self._screen.lines(self._fd, [self._prefix + _shown(line) for line in lines])
        if b"\r" in rest:
            text = _shown(rest)
            rest = b"\r" + text + (b"\r" if rest.endswith(b"\r") else b"")
            room = max(shutil.get_terminal_size().columns - self._width - 1, 0)
            text = text.decode(errors="replace")[:room].encode()
            self._screen.bar(self._fd, self._prefix + text)
        self._rest = rest

    def close(self) -> None:
        """The end of the stream also ends its last line."""
        last, self._rest = _shown(self._rest), b""
        if last.strip():
            self._screen.lines(self._fd, [self._prefix + last])


def _shown(line: bytes) -> bytes:
    """What a terminal shows of a line that is overwritten from its start at each \\r."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def write(fd: int, data: bytes) -> None:
    """Writes all of data, also to a descriptor that somebody made non-blocking."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])
