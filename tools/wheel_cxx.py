"""The C++ compiler of tools/wheels.sh: what it makes runs with glibc 2.28 or later.

    python tools/wheel_cxx.py MACHINE [arguments of g++]

It compiles with g++ and links with zig, which has the symbols of glibc 2.28. The GNU C++ library is
linked into the extension. An adapter takes the one that torch has loaded, because exceptions and
types pass between the two.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

GLIBC = "2.28"
TORCH = ("torch_python", "torch_cpu", "c10")

# Functions and variables that the headers of this host's g++ use, and that came later than the
# oldest libraries that a wheel runs with.
LATER = """\
// glibc 2.32: whether this process has one thread, which only makes reference counts faster.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
"""

# An adapter runs with the C++ library of GCC 8. link() makes all of this local to it.
LATER_ADAPTER = """\
#include <exception>
#include <new>
#include <sstream>

// GCC 9 and 11: constructors without arguments, and str() of temporaries.
template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;

// GCC 11: how pointers to exceptions are counted, by what counted them before.
extern "C" {
void copy_pointer(void *, const void *) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void end_pointer(void *) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
void add_reference(const void *p) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void release(void **p) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");

void add_reference(const void *p) {
  void *never_ended;
  copy_pointer(&never_ended, p);
}
void release(void **p) {
  end_pointer(p);
  *p = nullptr;
}
}

// GCC 11: what `new` of too many elements throws.
namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
} // namespace std
"""

# zig's linker has no such options. Debug information is removed afterwards.
DROPPED = {"-Wl,--exclude-libs,ALL", "-Wl,-z,text", "-Wl,--strip-debug", "-Wl,--as-needed"}


class Target:
    """The tools for one processor."""

    def __init__(self, machine: str) -> None:
        self.machine = machine
        cross = "" if machine == platform.machine() else f"{machine}-linux-gnu-"
        self.cxx = f"{cross}g++"
        if shutil.which(self.cxx) is None:
            sys.exit(f"wheel_cxx: {self.cxx}: no such compiler (tools/install_deps.sh --wheels)")
        self.strip = f"{cross}strip"
        self.zig = [
            sys.executable,
            "-m",
            "ziglang",
            "cc",
            "-target",
            f"{machine}-linux-gnu.{GLIBC}",
        ]

    def library(self, name: str) -> str:
        """The path of one of the compiler's own libraries."""
        command = [self.cxx, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not os.path.isabs(path):
            sys.exit(f"wheel_cxx: {self.cxx} has no {name}")
        return path

    def stubs(self, folder: Path) -> list[str]:
        """Libraries that stand for torch's when an adapter is linked: those of the other processor
        are not here. The symbols are looked for when the adapter is loaded."""
        made = []
        for name in TORCH:
            path = folder / f"lib{name}.so"
            run(*self.zig, "-shared", f"-Wl,-soname,{path.name}", "-x", "c", os.devnull, "-o", path)
            made.append(str(path))
        return made

    def link(self, arguments: list[str]) -> None:
        """Links the extension, or an adapter, which asks for torch's libraries."""
        adapter = f"-l{TORCH[0]}" in arguments
        kept = [a for a in arguments if a not in DROPPED and a.removeprefix("-l") not in TORCH]
        out = arguments[arguments.index("-o") + 1]
        with tempfile.TemporaryDirectory() as folder:
            later = Path(folder) / "later"
            later.with_suffix(".cc").write_text(LATER + (LATER_ADAPTER if adapter else ""))
            obj = later.with_suffix(".o")
            run(self.cxx, "-std=c++20", "-O2", "-fPIC", "-c", later.with_suffix(".cc"), "-o", obj)
            if adapter:
                libraries = ["-Wl,--no-as-needed", *self.stubs(Path(folder))]
                libraries.append(self.library("libstdc++.so"))
            else:
                libraries = [self.library("libstdc++.a")]
            run(*self.zig, *kept, obj, *libraries, self.library("libgcc_s.so.1"), "-lm")
        run(self.strip, "--strip-debug", out)


def run(*command: str | Path) -> None:
    done = subprocess.run(command)
    if done.returncode:
        sys.exit(done.returncode)


def main(machine: str, arguments: list[str]) -> None:
    target = Target(machine)
    if "-shared" in arguments:
        target.link(arguments)
    else:
        run(target.cxx, *arguments)
        if "--version" in arguments:
            run(*target.zig, "--version")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
