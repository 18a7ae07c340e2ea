"""The raw baseline: tools/rawecho.c, compiled here and driven over its standard input."""

import json
import os
import select
import subprocess
import tempfile
from pathlib import Path

from .pair import BenchError

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tools" / "rawecho.c"


class Baseline:
    """The two processes of rawecho. They use no CPU between rounds."""

    def __init__(self, cores: tuple[int, int] | None):
        worker, server = cores or (-1, -1)
        self._process = subprocess.Popen(
            [str(compiled()), str(worker), str(server)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> "Baseline":
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        process.kill()
        process.communicate()

    def measure(
        self, out: int, back: int, warmup: int, count: int, timeout: float
    ) -> dict[str, float]:
        """One round: `out` bytes there, `back` bytes home, `count` times; figures in µs."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(f"{out} {back} {warmup} {count}\n")
            ready, _, _ = select.select([stdout], [], [], timeout)
            if not ready:
                raise BenchError(f"the baseline did not answer in {timeout:g} s")
            text = stdout.readline()
        except BrokenPipeError:
            text = ""
        if not text:
            _, errors = self._process.communicate()
            raise BenchError(
                f"the baseline ended with status {self._process.returncode}: {errors.strip()}"
            )
        return json.loads(text)


def compiled() -> Path:
    """The program, compiled when its source is newer."""
    if not SOURCE.exists():
        raise BenchError(
            f"{SOURCE}: not found: the baseline needs the source tree of fserver (--no-baseline "
            "measures without it)"
        )
    binary = ROOT / "build" / "rawecho"
    try:
        if binary.stat().st_mtime >= SOURCE.stat().st_mtime:
            return binary
    except FileNotFoundError:
        pass
    binary.parent.mkdir(exist_ok=True)
    # Another benchmark may be at it too: each puts a whole file in place.
    with tempfile.TemporaryDirectory(dir=binary.parent) as scratch:
        fresh = Path(scratch) / "rawecho"
        command = [os.environ.get("CC", "cc"), "-O2", "-o", str(fresh), str(SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise BenchError(
                f"{command[0]}: not found: the baseline needs a C compiler (apt-get install gcc; "
                "--no-baseline measures without it)"
            ) from None
        except subprocess.CalledProcessError as error:
            raise BenchError(f"compile {SOURCE}:\n{error.stderr}") from None
        fresh.replace(binary)
    return binary
