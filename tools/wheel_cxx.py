"""The C++ compiler of tools/wheels.sh: what it makes runs with glibc 2.28 or later.

    python tools/wheel_cxx.py MACHINE [arguments of g++]

It compiles with g++ and links with zig, which has the symbols of glibc 2.28, and with
wheel_later.cc. The GNU C++ library is linked into the extension. An adapter takes the one that
torch has loaded, because exceptions and types pass between the two.
"""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

GLIBC = "2.28"
TORCH = ("torch_python", "torch_cpu", "c10")
# zig's linker has no such options. Debug information is removed afterwards.
DROPPED = {"-Wl,--exclude-libs,ALL", "-Wl,-z,text", "-Wl,--strip-debug", "-Wl,--as-needed"}


def run(*command: str | Path) -> None:
    if status := subprocess.run(command).returncode:
        sys.exit(status)


def library(cxx: str, name: str) -> str:
    return subprocess.check_output([cxx, f"-print-file-name={name}"], text=True).strip()


def link(cxx: str, zig: list[str], arguments: list[str], folder: Path) -> None:
    """Links the extension, or an adapter, which asks for torch's libraries."""
    adapter = f"-l{TORCH[0]}" in arguments
    kept = [a for a in arguments if a not in DROPPED and a.removeprefix("-l") not in TORCH]
    later, source = folder / "later.o", Path(__file__).with_name("wheel_later.cc")
    define = ["-DADAPTER"] if adapter else []
    run(cxx, "-std=c++20", "-O2", "-fPIC", *define, "-c", source, "-o", later)
    libraries: list[str | Path] = []
    if adapter:
        # Empty libraries stand for torch's, because those of the other processor are not here. The
        # symbols are looked for when the adapter is loaded.
        for name in TORCH:
            stub = folder / f"lib{name}.so"
            run(*zig, "-shared", f"-Wl,-soname,{stub.name}", "-x", "c", os.devnull, "-o", stub)
            libraries.append(stub)
        libraries = ["-Wl,--no-as-needed", *libraries, library(cxx, "libstdc++.so")]
    else:
        libraries = [library(cxx, "libstdc++.a")]
    run(*zig, *kept, later, *libraries, library(cxx, "libgcc_s.so.1"), "-lm")


def main(machine: str, arguments: list[str]) -> None:
    cross = "" if machine == platform.machine() else f"{machine}-linux-gnu-"
    cxx = f"{cross}g++"
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{GLIBC}"]
    if "-shared" in arguments:
        with tempfile.TemporaryDirectory() as folder:
            link(cxx, zig, arguments, Path(folder))
        run(f"{cross}strip", "--strip-debug", arguments[arguments.index("-o") + 1])
    else:
        run(cxx, *arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
