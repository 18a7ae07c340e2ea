"""Runs the blocks that blocks.py has found: processes, networks and time limits."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from blocks import ROOT, Block, Part, indented, parts

LIMIT = 100.0
"""Seconds that a block may take, all its parts together. Beside other tests one takes 77."""

_PREFIXES = ("DMLC_", "STEPMESH_", "STEPAF_", "BYTEPS_", "PS_", "FSERVER_", "PYTEST_")
_COMMANDS = {
    "python": "",
    "python3": "",
    "fserver": "-m fserver",
    "torchrun": "-m torch.distributed.run",
}


class Failed(AssertionError):
    """A block did not do what the page says."""


@cache
def can_unshare() -> bool:
    """Reports whether this process may make network namespaces."""
    try:
        command = ["unshare", "--net", "ip", "link", "set", "lo", "up"]
        return subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def missing(block: Block) -> str:
    """Why the block cannot run here; empty if it can."""
    if reason := block.mark("skip"):
        return reason
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    for need in block.marks.get("needs", []):
        wanted = {"gpu": 1, "2gpus": 2}.get(need, 0)
        if gpus < wanted:
            return f"needs {wanted} GPU(s), this host has {gpus}"
        if not wanted and importlib.util.find_spec(need) is None:
            return f"needs the Python module {need}"
    if any(part.host for part in parts(block.text)[1]) and not can_unshare():
        return "needs network namespaces, which this process may not make"
    return ""


def commands(folder: Path) -> None:
    """Puts the commands of this Python and this tree into the folder."""
    folder.mkdir(exist_ok=True)
    for name, arguments in _COMMANDS.items():
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (folder / name).chmod(0o755)


def environment(folder: Path) -> dict[str, str]:
    """What a user's shell would have, with those commands in front."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_PREFIXES)}
    return {
        **kept,
        "PATH": f"{folder / '.bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "FSERVER_INIT_TIMEOUT": "45",
    }


def _interruptible() -> None:
    """Ends with Ctrl-C: a shell has its background jobs, and all that they start, ignore that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Process:
    """A part that runs, and what it has printed."""

    def __init__(self, part: Part, command: list[str], folder: Path) -> None:
        self.part = part
        self._out = tempfile.TemporaryFile()
        self.popen = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_interruptible,
        )

    def output(self) -> str:
        return os.pread(self._out.fileno(), 1 << 20, 0).decode(errors="replace")

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.popen.wait()
        self._out.close()


@contextlib.contextmanager
def networks(hosts: list[list[str]]) -> Iterator[dict[str, list[str]]]:
    """Gives for each host, by its first address, the command that starts others in its namespace.

    Without hosts there is one, whose name is empty: a namespace if this process may make one. The
    namespaces belong to processes that sleep, so nothing is left when these end.
    """
    if len(hosts) not in (0, 2):
        raise Failed(f"a block has two hosts or none, not {hosts}")
    if not can_unshare():
        yield {"": []}
        return
    # "-" is there when the namespace is.
    holder = ["unshare", "--net", "sh", "-c", "ip link set lo up; echo -; exec sleep 600"]
    first = [host[0] for host in hosts] or [""]
    sleepers = [subprocess.Popen(holder, stdout=subprocess.PIPE) for _ in first]
    try:
        for sleeper in sleepers:
            assert sleeper.stdout is not None and sleeper.stdout.readline() == b"-\n"
        names = zip(first, sleepers, strict=True)
        enter = {name: f"nsenter -t {sleeper.pid} -n".split() for name, sleeper in names}
        for i, pair in enumerate(zip(*hosts, strict=True)):
            ours, theirs = (str(sleeper.pid) for sleeper in sleepers)
            link = f"ip link add eth{i} netns {ours} type veth peer name eth{i} netns {theirs}"
            subprocess.run(link.split(), check=True, timeout=10)
            for host, address in zip(first, pair, strict=True):
                for step in (f"addr add {address}/24 dev eth{i}", f"link set eth{i} up"):
                    subprocess.run([*enter[host], "ip", *step.split()], check=True, timeout=10)
        yield enter
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.communicate()


def _wait(running: list[Process], until: float, status: int) -> None:
    """Returns when all have ended with the status; fails when one has ended with another."""
    left = list(running)
    while left:
        for process in list(left):
            code = process.popen.poll()
            if code is not None:
                left.remove(process)
            if code not in (None, status):
                raise Failed(f"{process.part.comment or 'the block'}: exit status {code}")
        if time.monotonic() > until:
            raise Failed(f"did not end within {LIMIT:.0f} s")
        time.sleep(0.02)


def _first_line(process: Process, until: float) -> None:
    while "\n" not in process.output():
        if process.popen.poll() is not None or time.monotonic() > until:
            raise Failed(f"{process.part.comment}: printed nothing")
        time.sleep(0.02)


def _interrupted(process: Process, until: float) -> None:
    process.signal(signal.SIGINT)
    try:
        process.popen.wait(max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise Failed(f"{process.part.comment}: did not end by Ctrl-C") from None


def together(these: list[Part], folder: Path, until: float, status: int = 0) -> str:
    """Runs parts at the same time and gives what they printed."""
    running: list[Process] = []
    hosts = {part.host: part.addresses for part in these if part.host}
    with networks([hosts[name] for name in sorted(hosts)]) as prefix:
        try:
            for part in sorted(these, key=lambda part: not part.interrupted):
                running.append(
                    Process(part, [*prefix[part.host], "bash", "-ec", part.text], folder)
                )
                if part.interrupted:
                    _first_line(running[-1], until)
            _wait([p for p in running if not p.part.interrupted], until, status)
            for process in running:
                if process.part.interrupted:
                    _interrupted(process, until)
            return "".join(process.output() for process in running)
        except Failed as error:
            said = "".join(f"{p.part.comment}\n{indented(p.output())}\n" for p in running)
            raise Failed(f"{error}\n{said}") from None
        finally:
            for process in running:
                process.end()


def run(block: Block, saved: dict[str, str], folder: Path) -> str:
    """Runs a block to its end in the folder, and gives what it printed."""
    commands(folder / ".bin")
    for name, text in saved.items():
        (folder / name).write_text(text)
    until = time.monotonic() + LIMIT
    status = int(block.mark("status") or 0)
    if block.language == "python":
        (folder / "block.py").write_text(block.text)
        output = together([Part("", "exec python block.py")], folder, until, status)
    else:
        before, these = parts(block.text)
        output = together([Part("", before)], folder, until, 0 if these else status)
        if these:
            output += together(these, folder, until, status)
    for text in block.marks.get("expect", []):
        if text not in output:
            raise Failed(f"the output has no {text!r}:\n{indented(output)}")
    return output
