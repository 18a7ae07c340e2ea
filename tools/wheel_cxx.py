"""The C++ compiler of tools/wheels.sh: what it makes runs with glibc 2.28 or later.

    python tools/wheel_cxx.py MACHINE [arguments of g++]

It compiles with g++ and links with zig, which has the symbols of glibc 2.28, and with
wheel_later.cc. The GNU C++ library is linked into the extension. An adapter takes the one that
torch has loaded, because exceptions and types pass between the two.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

GLIBC = "2.28"
TORCH = ("torch_python", "torch_cpu", "c10")
# zig's linker has no such options. Debug information is removed afterwards.
DROPPED = {"-Wl,--exclude-libs,ALL", "-Wl,-z,text", "-Wl,--strip-debug", "-Wl,--as-needed"}


def run(*command: str | Path, capture: bool = False) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE if capture else None, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def link(cxx: str, zig: list[str], arguments: list[str], folder: Path) -> None:
    """Links the extension, or an adapter, which asks for torch's libraries."""

    def library(name: str) -> str:
        """The path of one of the compiler's own libraries."""
        path = run(cxx, f"-print-file-name={name}", capture=True).strip()
        if not os.path.isabs(path):
            sys.exit(f"wheel_cxx: {cxx} has no {name}")
        return path

    adapter = f"-l{TORCH[0]}" in arguments
    kept = [a for a in arguments if a not in DROPPED and a.removeprefix("-l") not in TORCH]
    later, source = folder / "later.o", Path(__file__).with_name("wheel_later.cc")
    define = ["-DADAPTER"] if adapter else []
    run(cxx, "-std=c++20", "-O2", "-fPIC", *define, "-c", source, "-o", later)
    libraries: list[str | Path] = [library("libstdc++.so" if adapter else "libstdc++.a")]
    # Empty libraries stand for torch's, because those of the other processor are not here. The
    # symbols are looked for when the adapter is loaded.
    for name in TORCH if adapter else ():
        stub = folder / f"lib{name}.so"
        run(*zig, "-shared", f"-Wl,-soname,{stub.name}", "-x", "c", os.devnull, "-o", stub)
        libraries.insert(-1, stub)
    needed = ["-Wl,--no-as-needed"] if adapter else []
    run(*zig, *kept, later, *needed, *libraries, library("libgcc_s.so.1"), "-lm")


def main(machine: str, arguments: list[str]) -> None:
    cross = "" if machine == platform.machine() else f"{machine}-linux-gnu-"
    cxx = f"{cross}g++"
    if shutil.which(cxx) is None:
        sys.exit(f"wheel_cxx: {cxx}: no such compiler (tools/install_deps.sh --wheels)")
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{GLIBC}"]
    if "-shared" in arguments:
        with tempfile.TemporaryDirectory() as folder:
            link(cxx, zig, arguments, Path(folder))
        run(f"{cross}strip", "--strip-debug", arguments[arguments.index("-o") + 1])
    else:
        run(cxx, *arguments)
        if "--version" in arguments:
            run(*zig, "--version")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
