"""Life of the processes of one host: start, output, signals, end.

- Every process leads a session of its own, so a signal reaches it once, from
  here, with whatever it has started. It dies with the launcher (child.py).
- One that fails ends all: SIGTERM, and SIGKILL when the grace is over. Its
  status, 128 + n for signal n, is the launcher's. Its peers may see that it has
  gone before it has, and fail too: what fails within a second counts as one
  failure, and endings.py says which process is the cause. A process that another one has
  lost is waited for, for the grace at most.
- The launcher says first which process is the cause, then what it ends, and at last how the
  others ended. A traceback that a lost peer or the signal explains, or that is the same as
  that of the cause, is not printed: its last line is in the list of the others.
- Where nobody reads the output any more, as after `| head`, all are killed; but what has begun to
  end ends as it would, without output. Where the reader is slow, everything waits for it.
  After a signal that is for the grace at most, and then the output is dropped.
- SIGINT, SIGTERM and SIGHUP are passed on to workers and servers, and SIGKILL
  follows when the grace is over, or at once with a second signal. The status is
  128 + n, or 0 if all of them took the signal for a request to end well.
- Servers end by themselves when the workers have left, and so does the
  scheduler. Those that have not when the grace after the last worker is over
  are ended, which is no failure. On one of several hosts all are waited for,
  because the workers may be elsewhere.
"""

import contextlib
import io
import os
import selectors
import signal
import time
from collections.abc import Iterator

from . import endings
from .children import Child
from .output import HOLD, Screen, Stream
from .roles import Process

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SETTLE = 1.0  # seconds in which failures count as one
LONGEST = 86400.0  # seconds of one wait: a selector takes no more than a month
LAST_WORDS = 1.0  # seconds that output is read for when every process has ended


class Supervisor:
    def __init__(self, processes: list[Process], grace: float, several_hosts: bool) -> None:
        self._processes, self._grace, self._several_hosts = processes, grace, several_hosts
        self._screen = Screen(self._unread, self._late)
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []
        self._failures: list[Child] = []
        self._cause: Child | None = None  # the one of them that counts
        self._settle_at: float | None = None  # when it is decided which of them counts
        self._settle_by: float | None = None  # that may be put off until then
        self._signal: int | None = None  # the first that was passed on
        self._end_at: float | None = None  # when those that should have ended are told to
        self._kill_at: float | None = None  # when those that are left are killed
        self._killed = False  # they are, if they have not ended yet

    def run(self) -> int:
        """Starts all, returns the exit status when all have ended. Main thread only."""
        with self._signals():
            try:
                for number, process in enumerate(self._processes):
                    if not self._start(process, number):
                        return 1
                while any(c.status is None for c in self._children):
                    self._read(self._patience())
                    for child in self._children:
                        if child.look():
                            self._ended(child)
                    self._advance(time.monotonic())
                until = time.monotonic() + LAST_WORDS
                while self._streams() and (left := until - time.monotonic()) > 0:
                    self._read(left)
                self._conclude()
                return self._result()
            except BrokenPipeError:  # nobody reads the output of a run that goes on
                return 128 + signal.SIGPIPE
            finally:
                for child in self._children:
                    child.signal(signal.SIGKILL)
                    child.reap()
                for stream in self._streams():
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
                with contextlib.suppress(BrokenPipeError):
                    self._screen.close()

    def _start(self, process: Process, number: int) -> bool:
        try:
            child = Child(process, self._screen, number)
        except OSError as error:
            self._screen.say(
                f"cannot start {process.name}, process {number + 1} of {len(self._processes)}: "
                f"{error.strerror} (start fewer on this host, or raise the limit of open files, "
                "ulimit -n, three for each, or of processes, ulimit -u)"
            )
            return False
        self._children.append(child)
        for fd, pipe in child.outputs.items():
            self._selector.register(pipe, selectors.EVENT_READ, child.streams[fd])
        return True

    # -- events

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals interrupt the selector, and are acted on in the loop."""
        receive, send = os.pipe()
        self._heard = receive
        os.set_blocking(receive, False)
        os.set_blocking(send, False)
        heard = [n for n in PASSED_ON if signal.getsignal(n) != signal.SIG_IGN]  # nohup
        before = {n: signal.signal(n, lambda *_: None) for n in (*heard, signal.SIGCHLD)}
        wakeup = signal.set_wakeup_fd(send, warn_on_full_buffer=False)
        self._selector.register(receive, selectors.EVENT_READ, None)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            os.close(receive)
            os.close(send)

    def _patience(self) -> float | None:
        times = [t for t in (self._settle_at, self._end_at, self._kill_at) if t is not None]
        if not self._ending:
            times += [t + HOLD for c in self._children if (t := c.error.held_since) is not None]
        return min(max(min(times) - time.monotonic(), 0), LONGEST) if times else None

    def _streams(self) -> list[Stream]:
        return [key.data for key in self._selector.get_map().values() if key.data]

    def _read(self, patience: float | None) -> bool:
        """Waits for output, a signal or the end of a child, takes what there is, and reports
        whether there was any."""
        ready = self._selector.select(patience)
        for key, _ in ready:
            if key.data is None:
                self._hear()
            elif data := os.read(key.fd, 1 << 16):
                key.data.feed(data)
            else:
                self._selector.unregister(key.fileobj)
                assert isinstance(key.fileobj, io.IOBase)
                key.fileobj.close()
                key.data.close()
        return bool(ready)

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._heard, 1 << 16):
                if number in PASSED_ON:
                    self._pass_on(number)

    def _unread(self) -> bool:
        """Whether the run goes on although nobody reads its output: Ctrl-C ends `| tee` too."""
        self._hear()
        return self._ending

    def _late(self) -> bool:
        """Whether the time to end is over, after a signal. Signals are heard here while a write
        waits for a reader."""
        self._hear()
        over = self._kill_at is not None and time.monotonic() >= self._kill_at
        return self._signal is not None and (over or self._killed)

    # -- decisions

    @property
    def _ending(self) -> bool:
        """Whether the run ends because of a failure or a signal."""
        return bool(self._failures) or self._signal is not None

    def _pass_on(self, number: int) -> None:
        if self._signal is not None:
            self._kill_at = time.monotonic()
            return
        self._signal = number
        self._kill_at = time.monotonic() + self._grace
        passed = [c for c in self._children if c.process.role != "scheduler"]
        running = [c.name for c in passed if c.status is None]
        for child in passed:  # first: the output may be gone
            child.told = True
            child.signal(number)
        if running:
            self._screen.say(
                f"passed {signal.Signals(number).name} on to {', '.join(running)} (those that run "
                f"for {self._grace:g} s more are killed, and at once with a second signal)"
            )

    def _ended(self, child: Child) -> None:
        child.signal(signal.SIGTERM)  # to what it has started and left behind
        if child.status == 0 or child.told:
            return
        if not self._failures:
            self._settle_at = time.monotonic() + SETTLE
            self._settle_by = self._settle_at + self._grace
        self._failures.append(child)

    def _settle(self, left: list[Child]) -> bool:
        """Decides which failure is the cause, and says so; reports False if it puts that off."""
        self._settle_at = None
        until = time.monotonic() + LAST_WORDS
        while self._read(0) and time.monotonic() < until:
            pass
        for child in self._children:
            child.raised = child.error.raised()
        cause = endings.cause(self._failures)
        now = time.monotonic()
        if self._settle_by and now < self._settle_by:
            if any(endings.likelier(c, cause) for c in left):
                self._settle_at = min(now + SETTLE, self._settle_by)
                return False
        self._cause = cause
        if cause.raised and self._screen.has_printed(cause.raised.text):
            cause.error.drop()  # another process that has not ended yet raised it before
        else:
            cause.error.release()
        self._screen.say(endings.sentence(cause))
        return True

    def _tell(self, children: list[Child]) -> None:
        for child in children:
            child.told = True
            child.signal(signal.SIGTERM)
        self._kill_at = time.monotonic() + self._grace

    def _advance(self, now: float) -> None:
        """What is due when so many have ended and it is so late."""
        left = [c for c in self._children if c.status is None]
        names = ", ".join(c.name for c in left)
        if not self._ending:
            for child in self._children:
                since = child.error.held_since
                if since is not None and (child.status == 0 or now >= since + HOLD):
                    child.error.release()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at, self._end_at, self._killed = None, None, True
            if left:
                self._screen.say(f"killed {names}, still running after the request to end")
            for child in left:
                child.told = True
                child.signal(signal.SIGKILL)
            return
        if self._settle_at is not None:
            if left and now < self._settle_at:
                return
            if not self._settle(left):
                return
            if left and self._kill_at is None and not self._killed:
                self._screen.say(f"ending {names}")
                self._tell(left)
        roles = {c.process.role for c in left}
        if self._signal is not None and roles == {"scheduler"} and not left[0].told:
            self._tell(left)
        told = self._killed or self._kill_at is not None
        if told or self._several_hosts or not left or "worker" in roles:
            return
        if self._end_at is None:
            self._end_at = now + self._grace
        elif now >= self._end_at:
            self._screen.say(
                f"{names}: still running {self._grace:g} s after the last worker ended, so "
                "ended by the launcher"
            )
            self._end_at = None
            self._tell(left)

    def _conclude(self) -> None:
        """Prints what is still held back, and how those ended that are not the cause."""
        others = [c for c in self._children if c is not self._cause]
        for child in others:
            child.raised = child.error.raised()
            if endings.explained(child, self._cause, self._signal):
                child.error.drop()
            else:
                child.error.release()
        for line in endings.others(others):
            self._screen.say(line)

    def _result(self) -> int:
        roles = [c for c in self._children if c.process.role != "scheduler"]
        if self._signal is not None and any(c.status for c in roles):
            return 128 + self._signal
        return self._cause.status or 0 if self._cause else 0
