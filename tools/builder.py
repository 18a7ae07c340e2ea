"""Builds the engine, the extension and its adapters to torch, for the Makefile and setup.py.

    python tools/builder.py engine   build/libfserver.a
    python tools/builder.py ext      that, and into fserver/ the extension for this Python, an
                                     adapter, and include/ and lib/ for programs in C and C++
    python tools/builder.py go       prints the path of the Go toolchain

Environment: CC, CXX, CXXFLAGS, LDFLAGS; MAX_JOBS, the compilers at a time; FSERVER_ARCHIVE, an
archive that was built elsewhere, without which Go is needed; FSERVER_TORCHES, "torch:torch:...",
folders that each get an adapter, instead of this Python's torch. pybind11 is that of the first.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from subprocess import PIPE, STDOUT

import needs
from needs import ROOT, BuildError, compiler

BUILD = ROOT / "build"
GENERATED = BUILD / "generated"
WORK = BUILD / sysconfig.get_config_var("SOABI")  # for this Python
HEADER = ROOT / "engine/cabi/fserver.h"

# Two Go runtimes live in one process as long as neither sees the other's symbols, and a Go runtime
# cannot be unloaded. Some compilers and LDFLAGS ask for immediate binding, so LINK comes after
# them; see fserver/_loader.py.
EXPORTS = "{ global: PyInit_*; local: *; };\n"
LINK = ["-shared", "-Wl,-z,nodelete", "-Wl,-z,lazy", "-Wl,-z,text", "-Wl,--as-needed"]
LINK += ["-Wl,--strip-debug", "-lresolv", "-lpthread"]


def _run(what: str, command: Sequence[object]) -> None:
    """Runs a command. What it prints comes in one piece, because others run beside it."""
    words = [str(word) for word in command]
    print(f"build: {what}\n", end="", flush=True)
    done = subprocess.run(words, cwd=ROOT, stdout=PIPE, stderr=STDOUT, text=True)
    if done.returncode:
        raise BuildError(f"{shlex.join(words)}: exit status {done.returncode}\n{done.stdout}")
    print(done.stdout, end="", flush=True)


def _words(variable: str) -> list[str]:
    return shlex.split(os.environ.get(variable, ""))


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """One build at a time in this tree."""
    BUILD.mkdir(exist_ok=True)
    with open(BUILD / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# What is up to date is not made again


def _put(path: Path, data: bytes) -> None:
    """Replaces a file if it differs. A process that has mapped the old one keeps it."""
    if path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(data)
    new.chmod(0o755 if ".so" in path.suffixes else 0o644)
    new.replace(path)


def _make(what: str, made: Path, inputs: list[Path], command: list[object]) -> Path:
    """Makes a file, unless the same command has made it from inputs with the same contents. What a
    compiler has included is in a file .d beside it."""
    noted, key = made.with_suffix(".d"), made.with_name(f"{made.name}.key")

    def read() -> list[Path]:
        names = noted.read_text().partition(":")[2] if noted.is_file() else ""
        return [*inputs, *(ROOT / name for name in shlex.split(names.replace("\\\n", " ")))]

    def digest() -> str:
        found = hashlib.sha256(repr(command).encode())
        for path in read():
            found.update(hashlib.sha256(path.read_bytes()).digest())
        return found.hexdigest()

    with contextlib.suppress(OSError):
        if made.is_file() and key.read_text() == digest():
            return made
    key.unlink(missing_ok=True)
    made.parent.mkdir(parents=True, exist_ok=True)
    started = time.time()
    _run(what, command)
    if all(path.stat().st_mtime < started for path in read()):  # nobody has edited one meanwhile
        key.write_text(digest())
    return made


def _compile(source: Path, made: Path, flags: list[str]) -> Path:
    name, noted = source.relative_to(ROOT), made.with_suffix(".d")
    command = [*compiler("CXX", "g++"), *flags, "-MD", "-MF", noted, "-c", name, "-o", made]
    return _make(f"c++ {name}", made, [source], command)


def _link(made: Path, inputs: list[Path], flags: list[str]) -> Path:
    command = [*compiler("CXX", "g++"), "-o", made, *inputs, *flags]
    return _make(f"link {made.name}", made, inputs, command)


# The archive, the extension and adapters


def archive() -> Path:
    """Builds build/libfserver.a, or takes the one that FSERVER_ARCHIVE names."""
    if given := needs.prebuilt():
        return given
    # As the Makefile sets it: Go's cache does not notice that a header of the system has come.
    flag, cflags = "-DCS_VERBS_INSTALLED", os.environ.get("CGO_CFLAGS", "-O2 -g")
    if os.path.exists("/usr/include/infiniband/verbs.h") and flag not in cflags:
        cflags += f" {flag}"
    go, made, noted = needs.find_go(), BUILD / "libfserver.a", GENERATED / "go_settings.txt"
    # With more memory, the compiler takes a tenth less time.
    env = ["env", "GOGC=400", "GOTOOLCHAIN=local", "CGO_ENABLED=1", f"CGO_CFLAGS={cflags}", go]
    # Go's own symbols stay for profilers; debug information would double the file.
    flags = ["-trimpath", "-buildvcs=false", "-ldflags=-w", "-buildmode=c-archive", "-o", made]
    # Go itself would compile all C again, even if nothing has changed.
    _put(noted, subprocess.run([*env, "env", "-changed"], cwd=ROOT, stdout=PIPE).stdout)
    files = [*ROOT.glob("engine/**/*.*"), *ROOT.glob("cshim/**/*.*"), *ROOT.glob("go.*")]
    inputs = sorted(path for path in files if path.is_file() and "_test." not in path.name)
    command = [*env, "build", *flags, "./engine/cabi"]
    return _make("go ./engine/cabi", made, [Path(go), noted, *inputs], command)


def commit() -> str:
    """The commit that this tree is built from, with "-dirty" if something was changed since; empty
    in a source archive that does not say."""
    noted = ROOT / "COMMIT"  # in the source distribution
    if noted.is_file():
        return noted.read_text().strip()
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return ""  # it may lie within a repository of something else
    describe = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def source(tree: Path) -> None:
    """Adds the commit and the Go modules of the engine to an unpacked source distribution."""
    (tree / "COMMIT").write_text(f"{commit()}\n")
    _run("go mod vendor", ["env", f"GO={needs.find_go()}", ROOT / "tools/vendor.sh", tree])


def extension(package: Path) -> None:
    """Builds the extension and its adapters into a package folder."""
    torches, workers = needs.need_all(), needs.jobs()
    with _lock():
        # The extension holds the source of the channel's kernels for NVRTC. A compiler takes no
        # literal above 64 KiB, but any number of them side by side.
        kernels = [ROOT / "cshim/cuda" / name for name in ("cs_channel.h", "channel.cu")]
        text = "".join(f'R"cuda({kernel.read_text()})cuda"\n' for kernel in kernels)
        _put(GENERATED / "channel_source.inc", text.encode())
        fits = needs.adapters().literal(HEADER)
        _put(GENERATED / "adapter_id.inc", f"#define FS_ADAPTER {fits}\n".encode())

        flags = ["-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
        flags += ["-D_GLIBCXX_USE_CXX11_ABI=1", "-Iengine/cabi", "-Icshim/cuda", "-Ifserver/_torch"]
        flags += [f"-I{GENERATED}", *_words("CXXFLAGS"), "-std=c++20"]
        flags += needs.adapters().includes(torches[0][1], needs.python_headers())
        sources = sorted((ROOT / "csrc").glob("*.cc"))
        jobs: list[Callable[[], Path]] = [partial(_adapter, *torch) for torch in torches]
        jobs += [partial(_compile, src, WORK / f"{src.stem}.o", flags) for src in sources]
        jobs.append(archive)
        with ThreadPoolExecutor(workers) as pool:
            results = list(pool.map(lambda job: job(), jobs))  # which cancels the rest at an error

        exports = WORK / "exports.map"
        _put(exports, EXPORTS.encode())
        flags = [*_words("LDFLAGS"), "-Wl,--exclude-libs,ALL", f"-Wl,--version-script={exports}"]
        made = WORK / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        _link(made, results[len(torches) :], [*flags, *LINK])
        _put(package / made.name, made.read_bytes())
        for adapter in results[: len(torches)]:
            _put(package / "_torch" / adapter.name, adapter.read_bytes())
        _put(package / "_commit", f"{commit() or 'unknown'}\n".encode())


def _adapter(version: str, torch: Path) -> Path:
    how, work = needs.adapters(), BUILD / f"{WORK.name}-torch-{version}"
    flags = [*how.compile_flags(HEADER), *how.includes(torch, needs.python_headers())]
    made = _compile(how.SOURCE, work / "adapter.o", ["-Wall", "-Wextra", *flags])
    return _link(work / how.file_name(version), [made], how.link_flags(torch))


# For programs in C and C++


def sdk(package: Path) -> None:
    """Builds into a package folder what programs in C and C++ need: include/ and lib/, with the
    archive, the shared library, and files for CMake and pkg-config."""
    with _lock():
        files = {p.relative_to(ROOT): p.read_bytes() for p in ROOT.glob("include/**/*.h*")}
        files[Path("include", HEADER.name)] = HEADER.read_bytes()
        header = HEADER.read_text()
        abi = re.findall(r"^#define FS_ABI (\d+)$", header, re.MULTILINE)[0]
        init = (ROOT / "fserver/__init__.py").read_text()
        version = re.findall(r'^__version__ = "(.+?)"', init, re.MULTILINE)[0]
        for source in (ROOT / "tools/sdk").iterdir():
            folder = "cmake/fserver" if source.suffix == ".cmake" else "pkgconfig"
            text = source.read_text().replace("@ABI@", abi).replace("@VERSION@", version)
            files[Path("lib", folder, source.name)] = text.encode()
        for made in _libraries(header, abi, needs.prebuilt() or BUILD / "libfserver.a"):
            files[Path("lib", made.name)] = made.read_bytes()
        for name, data in files.items():
            _put(package / name, data)
        for path in [*package.glob("include/**/*"), *package.glob("lib/**/*")]:
            if path.is_file() and path.relative_to(package) not in files:
                path.unlink()  # of an older build


def _libraries(header: str, abi: str, archive: Path) -> list[Path]:
    """The archive, the shared library, and a stub of that for the linker.

    A wheel can hold no symbolic link. So programs are linked with libfserver.so, which has the
    names of the functions alone, and load the library by its soname.
    """
    name = f"libfserver.so.{abi}"
    exports, stub, forwarded = BUILD / "fserver.map", BUILD / "stub.cc", GENERATED / "forwarded.inc"
    _put(exports, f"FSERVER_{abi} {{ global: fs_*; local: *; }};\n".encode())
    functions = sorted(set(re.findall(r"\b(fs_\w+)\(", re.sub("//.*", "", header))))
    bodies = "".join(f"void {function}() {{}}\n" for function in functions)
    _put(stub, f'extern "C" {{\n{bodies}}}\n'.encode())
    undefined = subprocess.run(["nm", "-u", archive], capture_output=True, text=True).stdout
    nvml = sorted(set(re.findall(r"\bnvml\w+", undefined)))
    _put(forwarded, "".join(f"FORWARD({function})\n" for function in nvml).encode())

    flags = ["-O2", "-fPIC", f'-DFORWARDED="{forwarded}"']
    forward = _compile(ROOT / "cshim/nvml/forward.cc", BUILD / "forward.o", flags)
    empty = _compile(stub, BUILD / "stub.o", flags)
    flags = [*_words("LDFLAGS"), f"-Wl,--version-script={exports}", f"-Wl,-soname,{name}"]
    flags += ["-Wl,-z,defs", *LINK, "-ldl"]
    # The linker is told to take the functions of the archive: nothing names them.
    named = [f"-Wl,-u,{function}" for function in functions]
    library = _link(BUILD / name, [forward, archive], [*named, *flags])
    whole = BUILD / "sdk/libfserver.a"
    both = ["sh", "-c", 'cp "$1" "$2" && ar r "$2" "$3"', "sh", archive, whole, forward]
    _make("ar libfserver.a", whole, [archive, forward], both)
    return [whole, library, _link(BUILD / "libfserver.so", [empty], flags)]


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    what = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    what.add_argument("what", choices=("engine", "ext", "go"))
    wanted = what.parse_args().what
    with needs.one_line():
        if wanted == "go":
            print(needs.find_go())
        elif wanted == "engine":
            with _lock():
                archive()
        else:
            extension(ROOT / "fserver")
            sdk(ROOT / "fserver")


if __name__ == "__main__":
    main()
