"""Output of several processes on one screen or in one log.

Every line gets the name of its process. Lines are never mixed, and a line is
what a terminal would show when it ends: of a progress bar, which redraws its
line with \\r, that is the last state. On a terminal the bar that moved last is
also shown while it moves, below everything else.

A Python traceback on standard error is held back, with the lines that follow it, if it may say
nothing new: it is of a lost peer or of Ctrl-C, or another process has just printed the same error.
Only the end of the processes shows whether it is needed.
"""

import os
import re
import select
import shutil
import time
from collections import defaultdict, deque
from collections.abc import Callable

from . import tracebacks

LIMIT = 1 << 16  # a longer line is cut, so that nothing grows without bound
ERASE = b"\r\x1b[K"
COLOURS = (36, 33, 35, 32, 34, 31)
LOOK = 0.2  # seconds between looks at signals while nobody takes the output
HOLD = 10.0  # seconds that a traceback is held back for while nothing has failed
LOG_LINE = re.compile(rb"\d{4}-\d\d-\d\dT\S+\t(DEBUG|INFO|WARN|ERROR)\t")


class Screen:
    """Where the lines go: file descriptors 1 and 2, which may be one terminal.

    Args:
        unread: whether lines are dropped when nobody reads them any more. Else that raises
            BrokenPipeError.
        late: whether lines are dropped that a reader does not take. Asked while they wait for it.
    """

    def __init__(
        self,
        unread: Callable[[], bool] = lambda: False,
        late: Callable[[], bool] = lambda: False,
    ) -> None:
        self._unread, self._late = unread, late
        self.tty = {fd: os.isatty(fd) for fd in (1, 2)}
        self._bar = False  # a progress bar stands in the last line
        # What has to be written, by file. The first entry is being written.
        self._waiting = defaultdict[object, deque[tuple[int, bytes]]](deque)
        self._raised: dict[str, float] = {}  # when an exception was printed last

    def stream(self, fd: int, name: str, number: int, holds: bool = False) -> "Stream":
        """A stream of the process called name, to fd; number chooses the colour. holds: it holds
        tracebacks back."""
        prefix = f"[{name}] "
        width = len(prefix)
        if self.tty[fd] and not os.environ.get("NO_COLOR"):
            prefix = f"\x1b[{COLOURS[number % len(COLOURS)]}m{prefix}\x1b[0m"
        return Stream(self, fd, prefix.encode(), width, holds)

    def say(self, text: str) -> None:
        """A line of the launcher's own, on standard error."""
        self.lines(2, [f"fserver run: {text}".encode()])

    def lines(self, fd: int, lines: list[bytes]) -> None:
        erase = self._bar and self.tty[fd]
        if erase:
            self._bar = False
        self._write(fd, (ERASE if erase else b"") + b"".join(line + b"\n" for line in lines))

    def bar(self, fd: int, text: bytes) -> None:
        if self.tty[fd]:
            self._bar = True
            self._write(fd, ERASE + text)

    def _write(self, fd: int, data: bytes) -> None:
        waiting = self._waiting[_file(fd)]
        waiting.append((fd, data))
        if len(waiting) > 1:  # a signal has come during a write, which may be within a line
            return
        try:
            while waiting:
                try:
                    write(*waiting[0], self._late)
                except BrokenPipeError:
                    if not self._unread():
                        raise
                waiting.popleft()
        finally:
            waiting.clear()

    def printed(self, exception: str) -> None:
        """A traceback that ends with this exception has been printed."""
        self._raised[exception] = time.monotonic()

    def has_printed(self, exception: str) -> bool:
        """Whether that was done within the last seconds."""
        return time.monotonic() - self._raised.get(exception, -HOLD) < HOLD

    def close(self) -> None:
        """Leaves the cursor at the start of an empty line."""
        if self._bar:
            self.lines(1 if self.tty[1] else 2, [])


class Stream:
    """One output of one process, cut into lines."""

    def __init__(
        self, screen: Screen, fd: int, prefix: bytes, width: int, holds: bool = False
    ) -> None:
        self._screen, self._fd, self._prefix, self._width = screen, fd, prefix, width
        self._rest = b""  # the line that has not ended yet
        self._holds = holds
        self._held: list[bytes] = []  # lines from a traceback on
        self._shown: list[bytes] = []  # the same, printed, while nothing follows
        self.held_since: float | None = None
        self.last = ""  # the last line with text that is none of the engine's log

    def feed(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        if len(rest) > LIMIT:
            lines.append(rest)
            rest = b""
        self._take([_shown(line) for line in lines])
        if b"\r" in rest and not self._held:
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
            self._take([last])

    def raised(self) -> tracebacks.Raised | None:
        """The exception of the last traceback, if the output ends with it."""
        return tracebacks.split(self._held or self._shown)[0]

    def release(self) -> None:
        """Prints what is held back."""
        if self._held:
            held = self._held
            if raised := self.raised():
                self._screen.printed(raised.text)
            self._let_go(held)
            self._shown = held

    def drop(self) -> None:
        """Prints what is held back, without its tracebacks."""
        self._let_go(tracebacks.split(self._held)[1])

    def _take(self, lines: list[bytes]) -> None:
        for line in lines:
            if (text := line.strip()) and not LOG_LINE.match(text):
                self.last = text[: tracebacks.MOST].decode(errors="replace")
        if self._holds and not self._held and tracebacks.BEGIN in lines:
            begin = lines.index(tracebacks.BEGIN)
            self._show(lines[:begin])
            lines = lines[begin:]
            self._held, self.held_since = lines, time.monotonic()
        elif self._held:
            self._held += lines
        else:
            self._show(lines)
        if self._held and (self._tells() or sum(map(len, self._held)) > LIMIT):
            self.release()

    def _tells(self) -> bool:
        """Whether what is held back says something new."""
        raised = self.raised()
        return raised is not None and not (
            raised.lost or raised.interrupted or self._screen.has_printed(raised.text)
        )

    def _let_go(self, lines: list[bytes]) -> None:
        self._held, self.held_since = [], None
        self._show(lines)

    def _show(self, lines: list[bytes]) -> None:
        if lines:
            self._shown = []
            self._screen.lines(self._fd, [self._prefix + line for line in lines])


def _shown(line: bytes) -> bytes:
    """What a terminal shows of a line that is overwritten from its start at each \\r."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _file(fd: int) -> object:
    """Identifies the file of a descriptor. Descriptors 1 and 2 may have the same."""
    try:
        found = os.fstat(fd)
    except OSError:
        return fd
    return found.st_dev, found.st_ino


def _takes(fd: int) -> bool:
    """Waits for room in a descriptor. Errors are for the write."""
    room = select.poll()
    room.register(fd, select.POLLOUT)
    return bool(room.poll(1e3 * LOOK))


def write(fd: int, data: bytes, late: Callable[[], bool] = lambda: False) -> None:
    """Writes all of data, also to a descriptor that somebody made non-blocking. Data that cannot be
    written, as to a full disk or a terminal that is gone, is dropped: the run goes on. So is
    data that nobody takes, once ``late`` says that it is too late.

    Raises:
        BrokenPipeError: nobody reads it any more.
    """
    while data:
        try:
            if _takes(fd):
                data = data[os.write(fd, data[: select.PIPE_BUF]) :]  # which a pipe has room for
            elif late():
                return
        except BlockingIOError:  # another process was faster
            time.sleep(LOOK)
        except BrokenPipeError:
            raise
        except OSError:
            return
