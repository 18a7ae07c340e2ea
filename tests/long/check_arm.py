"""What wheels for 64-bit Arm hold, as far as this host can try it: qemu runs the tests of the C
interface against the engine that tools/wheels.sh has linked into them, and imports the extension.

torch itself ends with a segmentation fault in qemu, so no tensor has been moved there.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = ROOT / "build/wheels/aarch64.a"
SOURCE = ROOT / "tests/cabi/abi_test.c"
CASES = re.findall(r"^CASE\((\w+)\) \{", SOURCE.read_text(), re.MULTILINE)
LIBC = "/usr/aarch64-linux-gnu"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if platform.machine() == "aarch64":
        pytest.skip("this processor is the one: make test has run these")
    if not ARCHIVE.is_file():
        pytest.skip(f"there is no {ARCHIVE}: tools/wheels.sh --machine aarch64 makes it")
    for tool in ("aarch64-linux-gnu-gcc", "qemu-aarch64"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}: tools/install_deps.sh --wheels")
    path = tmp_path_factory.mktemp("arm") / "abi_test"
    # The GPU driver's functions are bound when they are first used, as fserver.h says.
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-pthread", "-Wl,-z,lazy", "-Wl,--export-dynamic"]
    flags += ["-Wl,--unresolved-symbols=ignore-in-object-files", f"-I{ROOT / 'engine/cabi'}"]
    files = [str(SOURCE), str(ARCHIVE), "-lresolv", "-o", str(path)]
    subprocess.run(["aarch64-linux-gnu-gcc", *flags, *files], check=True)
    return path


@pytest.mark.parametrize("case", CASES)
def test_engine(program: Path, case: str) -> None:
    command = ["qemu-aarch64", "-L", LIBC, str(program), case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_extension_loads(tmp_path: Path) -> None:
    """With FSERVER_ARM_ROOT, a folder with a Python for Arm in it (usr/bin/python3.11, say)."""
    root = os.environ.get("FSERVER_ARM_ROOT")
    if not root:
        pytest.skip("FSERVER_ARM_ROOT names no folder with a Python for Arm")
    (python,) = Path(root).glob("usr/bin/python3.?*[0-9]")
    tag = "cp" + python.name.removeprefix("python").replace(".", "")
    (wheel,) = (ROOT / "dist").glob(f"*-{tag}-*aarch64.whl")
    shutil.unpack_archive(wheel, tmp_path, "zip")
    code = "import fserver, fserver._loader as l; print(l._import('fserver._C').abi)"
    done = subprocess.run(
        ["qemu-aarch64", "-L", root, str(python), "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "QEMU_LD_PREFIX": root},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    header = (ROOT / "engine/cabi/fserver.h").read_text()
    assert done.stdout.split() == re.findall(r"#define FS_ABI (\d+)", header)
