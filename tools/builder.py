"""Builds the engine's archive, the extension and its adapters to torch, for the Makefile and for
setup.py.

    python tools/builder.py engine   build/libfserver.a
    python tools/builder.py ext      the archive, fserver/_C.*.so from it and csrc/, and an adapter;
                                     fserver/include and fserver/lib for programs in C and C++
    python tools/builder.py adapter [--torch DIR] [--out PATH]
                                     one adapter, from fserver/_torch/; prints its path
    python tools/builder.py go       prints the path of the Go toolchain

The extension is for the Python that runs this file. An adapter is for this Python and one minor
version of torch: that of the package folder --torch (with include/, lib/ and version.py), else of
this Python's torch. --out is a file or an existing folder (default fserver/_torch/).

Environment: CC, CXX and CXXFLAGS; LDFLAGS for the link of the extension and ADAPTER_LDFLAGS for
that of an adapter; MAX_JOBS, the number of compilers at a time; FSERVER_ARCHIVE, an archive that
was built elsewhere, without which Go is needed; FSERVER_TORCHES, folders of packages torch, with
":" between them: `ext` and setup.py build an adapter for each, instead of for this Python's torch.
The pybind11 of the first is used.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import filecmp
import functools
import hashlib
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import needs
from needs import ROOT, BuildError

BUILD = ROOT / "build"
GENERATED = BUILD / "generated"
WORK = BUILD / sysconfig.get_config_var("SOABI")  # for this Python
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
HEADER = ROOT / "engine/cabi/fserver.h"

# Two Go runtimes live in one process as long as neither sees the other's symbols, and a Go runtime
# cannot be unloaded. Some compilers default to immediate binding; see fserver/_loader.py.
EXPORTS = "{ global: PyInit_*; local: *; };\n"
LINK = ["-shared", "-Wl,-z,nodelete", "-Wl,-z,lazy", "-Wl,-z,text", "-Wl,--as-needed"]
LINK += ["-Wl,--strip-debug", "-lresolv", "-lpthread"]


def _say(text: str) -> None:
    print(f"build: {text}\n", end="", flush=True)  # one write: compilers run side by side


def _run(command: list[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    output = done.stdout + done.stderr
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}: exit status {done.returncode}\n{output}")
    print(output, end="", flush=True)


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


def _write(path: Path, text: str) -> None:
    """Writes a generated file, unless it is so already."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _replace(path: Path, made: Path) -> None:
    """Copies a file in one step, unless it is so already: a process that has mapped the old one
    keeps it."""
    if path.is_file() and filecmp.cmp(made, path, shallow=False):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(made.read_bytes())
    part.chmod(0o755 if ".so" in path.suffixes else 0o644)
    part.replace(path)


def _make(made: Path, key: Sequence[object], what: str, *commands: list[str]) -> None:
    """Runs the commands that make a file, unless it was made with the same key, and after all
    sources that the compiler has noted beside it. Files in the key count by their contents."""
    parts = [k.read_bytes() if isinstance(k, Path) else str(k).encode() for k in key]
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    noted, sources = made.with_name(f"{made.name}.key"), made.with_suffix(".d")
    with contextlib.suppress(OSError):
        # "x.o: a.cc b.h \": names with blanks are escaped, so shlex reads them.
        text = sources.read_text().partition(":")[2] if made.suffix == ".o" else ""
        times = [(ROOT / n).stat().st_mtime_ns for n in shlex.split(text.replace("\\\n", " "))]
        if noted.read_text() == digest and made.stat().st_mtime_ns > max(times, default=0):
            return
    _say(what)
    started = time.time_ns()
    made.parent.mkdir(parents=True, exist_ok=True)
    noted.unlink(missing_ok=True)
    for command in commands:
        _run(command)
    os.utime(made, ns=(started, started))  # a source edited meanwhile is younger
    noted.write_text(digest)


@functools.cache
def _cxx() -> list[str]:
    """The C++ compiler, as words."""
    return needs.compiler("CXX", "g++")


@functools.cache
def _version() -> str:
    return subprocess.run([*_cxx(), "--version"], capture_output=True, text=True).stdout


def _compile(source: Path, obj: Path, flags: list[str], more: list[str], *key: object) -> None:
    """The flags `more`, which name headers of Python and others, do not count: such headers count
    by version, so that a build in another environment takes the same objects."""
    command, name = [*_cxx(), *flags], str(source.relative_to(ROOT))
    output = ["-MMD", "-MF", str(obj.with_suffix(".d")), "-c", name, "-o", str(obj)]
    key = (*command, _version(), sys.version, *key)
    _make(obj, key, f"c++ {name}", [*command, *more, *output])


def _link(made: Path, inputs: list[Path], flags: list[str]) -> None:
    command = [*_cxx(), "-o", str(made), *map(str, inputs), *flags]
    _make(made, [*_cxx(), *flags, _version(), *inputs], f"link {made.name}", command)


# The archive, the extension and adapters


def archive() -> Path:
    """Builds build/libfserver.a, or takes the one that FSERVER_ARCHIVE names."""
    given = needs.prebuilt()
    if given:
        return given
    path = BUILD / "libfserver.a"
    needs.compiler("CC", "gcc")
    env = {**os.environ, "GOTOOLCHAIN": "local", "CGO_ENABLED": "1"}
    # As the Makefile sets it: Go's cache does not notice that a header of the system has come.
    flag = "-DCS_VERBS_INSTALLED"
    env.setdefault("CGO_CFLAGS", "-O2 -g")
    if os.path.exists("/usr/include/infiniband/verbs.h") and flag not in env["CGO_CFLAGS"]:
        env["CGO_CFLAGS"] += f" {flag}"
    # A source distribution brings the modules. Go's own symbols stay for profilers; debug
    # information would double the file.
    modules = "-mod=vendor" if (ROOT / "vendor").is_dir() else "-mod=readonly"
    flags = [modules, "-trimpath", "-buildvcs=false", "-ldflags=-w", "-buildmode=c-archive"]
    _say("go ./engine/cabi")
    _run([needs.find_go(), "build", *flags, "-o", str(path), "./engine/cabi"], env)
    return path


def _jobs() -> int:
    """Compilers at a time."""
    given = os.environ.get("MAX_JOBS", "") or str(len(os.sched_getaffinity(0)))
    if not given.isdecimal() or int(given) == 0:
        raise BuildError(f"MAX_JOBS={given}: want a whole number from 1, or leave it out")
    return int(given)


def commit() -> str | None:
    """The commit that this tree is built from, with "-dirty" if something was changed since; None
    in a source archive that does not say."""
    noted = ROOT / "COMMIT"  # in the source distribution
    if noted.is_file():
        return noted.read_text().strip()
    describe = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    # A source archive may have been unpacked within a repository of something else.
    with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
        if (ROOT / ".git").exists():
            return subprocess.check_output(
                describe, cwd=ROOT, text=True, stderr=subprocess.DEVNULL
            ).strip()
    return None


def _units(torch: Path) -> list[tuple]:
    """What the extension is compiled from, as arguments of _compile.

    The binding's pybind11 is the copy among torch's headers. No other header of torch can be found.
    """
    shown = WORK / "include"
    shown.mkdir(parents=True, exist_ok=True)
    pybind11 = shown / "pybind11"
    if not (pybind11.is_symlink() and pybind11.resolve() == torch / "include/pybind11"):
        pybind11.unlink(missing_ok=True)
        pybind11.symlink_to(torch / "include/pybind11")
    common = pybind11 / "detail/common.h"
    bound = [common] if common.is_file() else []

    flags = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    flags += ["-D_GLIBCXX_USE_CXX11_ABI=1", "-Iengine/cabi", "-Icshim/cuda", "-Ifserver/_torch"]
    flags += [f"-I{GENERATED.relative_to(ROOT)}", *_words("CXXFLAGS")]
    headers = ["-isystem", str(shown), "-isystem", str(needs.python_headers())]
    units = []
    for source in sorted((ROOT / "csrc").glob("*.cc")):
        more = bound if "#include <pybind11/" in source.read_text() else []
        units.append((source, WORK / f"{source.stem}.o", flags, headers, *more))
    return units


def extension(package: Path) -> Path:
    """Builds the extension and its adapters into a package folder, with the header of the engine,
    which adapters are compiled with."""
    needs.need_platform()
    torches = needs.need_torches()
    made = WORK / f"_C{SUFFIX}"
    with _lock():
        # The extension holds the source of the channel's kernels for NVRTC. A compiler takes no
        # literal above 64 KiB, but any number of them side by side.
        kernels = [ROOT / "cshim/cuda" / name for name in ("cs_channel.h", "channel.cu")]
        text = "".join(f'R"cuda({part.read_text()})cuda"\n' for part in kernels)
        _write(GENERATED / "channel_source.inc", text)
        fits = needs.adapters().literal(HEADER)
        _write(GENERATED / "adapter_id.inc", f"#define FS_ADAPTER {fits}\n")
        units = _units(torches[0][1])
        with ThreadPoolExecutor(_jobs()) as pool:
            # The objects need no more of the engine than its header, so Go builds beside them.
            engine = pool.submit(archive)
            adapters = [pool.submit(_adapter, *torch) for torch in torches]
            objects = [pool.submit(_compile, *unit) for unit in units]
            try:
                *done, library = [job.result() for job in (*adapters, *objects, engine)]
            except BuildError:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

        exports = WORK / "exports.map"
        _write(exports, EXPORTS)
        flags = ["-Wl,--exclude-libs,ALL", f"-Wl,--version-script={exports}", *LINK]
        _link(made, [*(unit[1] for unit in units), library], [*flags, *_words("LDFLAGS")])

        _replace(package / made.name, made)
        for adapter in filter(None, done):
            _replace(package / "_torch" / adapter.name, adapter)
        _replace(package / "include/fserver.h", HEADER)
        _write(package / "_commit", f"{commit() or 'unknown'}\n")
    return package / made.name


def _adapter(version: str, torch: Path) -> Path:
    """Builds the adapter for one torch, if it is not up to date."""
    how, work = needs.adapters(), BUILD / f"{WORK.name}-torch-{version}"
    made, obj = work / how.file_name(version), work / "adapter.o"
    flags = ["-Wall", "-Wextra", *how.compile_flags(HEADER), *_words("CXXFLAGS")]
    _compile(how.SOURCE, obj, flags, how.includes(torch, needs.python_headers()), version)
    _link(made, [obj], [*how.link_flags(torch), *_words("ADAPTER_LDFLAGS")])
    return made


def adapter(torch: str | None, out: str | None) -> Path:
    """Builds one adapter to a file or into a folder; see above."""
    version, home = needs.torch_in(torch, "--torch") if torch else needs.need_torch()
    path = Path(out).resolve() if out else ROOT / "fserver/_torch"
    with _lock():
        made = _adapter(version, home)
        if path.is_dir():
            path /= made.name
        _replace(path, made)
    return path


# For programs in C and C++


def sdk(package: Path) -> None:
    """Builds into a package folder what programs in C and C++ need: include/ and lib/, with the
    archive, the shared library, and files for CMake and pkg-config."""
    with _lock():
        headers = {
            path.relative_to(ROOT / "include"): path for path in ROOT.glob("include/**/*.h*")
        }
        headers[Path(HEADER.name)] = HEADER
        for name, path in headers.items():
            _replace(package / "include" / name, path)
        for path in package.glob("include/**/*.h*"):
            if path.relative_to(package / "include") not in headers:
                path.unlink()  # it is gone
        header = HEADER.read_text()
        abi = re.findall(r"^#define FS_ABI (\d+)$", header, re.MULTILINE)[0]
        for made in _libraries(header, abi, needs.prebuilt() or BUILD / "libfserver.a"):
            _replace(package / "lib" / made.name, made)
        init = (ROOT / "fserver/__init__.py").read_text()
        version = re.findall(r'^__version__ = "(.+?)"', init, re.MULTILINE)[0]
        for source in (ROOT / "tools/sdk").iterdir():
            folder = "cmake/fserver" if source.suffix == ".cmake" else "pkgconfig"
            text = source.read_text().replace("@ABI@", abi).replace("@VERSION@", version)
            _write(package / "lib" / folder / source.name, text)


def _libraries(header: str, abi: str, archive: Path) -> list[Path]:
    """The archive, the shared library, and a stub of that for the linker.

    A wheel can hold no symbolic link. So programs are linked with libfserver.so, which has the
    names of the functions alone, and load the library by its soname.
    """
    name = f"libfserver.so.{abi}"
    exports, stub, forwarded = BUILD / "fserver.map", BUILD / "stub.cc", GENERATED / "forwarded.inc"
    _write(exports, f"FSERVER_{abi} {{ global: fs_*; local: *; }};\n")
    functions = sorted(set(re.findall(r"\b(fs_\w+)\(", re.sub("//.*", "", header))))
    bodies = "".join(f"void {function}() {{}}\n" for function in functions)
    _write(stub, f'extern "C" {{\n{bodies}}}\n')
    undefined = subprocess.run(["nm", "-u", archive], capture_output=True, text=True).stdout
    nvml = sorted(set(re.findall(r"\bnvml\w+", undefined)))
    _write(forwarded, "".join(f"FORWARD({function})\n" for function in nvml))

    stub_object, forward = BUILD / "stub.o", BUILD / "forward.o"
    flags = ["-O2", "-fPIC", f'-DFORWARDED="{forwarded}"']
    _compile(stub, stub_object, flags, [])
    _compile(ROOT / "cshim/nvml/forward.cc", forward, flags, [])
    flags = [f"-Wl,--version-script={exports}", f"-Wl,-soname,{name}", "-Wl,-z,defs", *LINK]
    flags += ["-ldl", *_words("LDFLAGS")]
    _link(BUILD / "libfserver.so", [stub_object], flags)
    # The linker is told to take the functions of the archive: nothing names them.
    named = [f"-Wl,-u,{function}" for function in functions]
    _link(BUILD / name, [forward, archive], [*named, *flags])
    whole = BUILD / "sdk/libfserver.a"
    commands = ["cp", str(archive), str(whole)], ["ar", "r", str(whole), str(forward)]
    _make(whole, [archive, forward], "ar libfserver.a", *commands)
    return [whole, BUILD / name, BUILD / "libfserver.so"]


def main(arguments: Sequence[str]) -> int:
    what = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = what.add_subparsers(dest="command", required=True)
    for name in ("engine", "ext", "adapter", "go"):
        parser = commands.add_parser(name)
        for option in ("--torch", "--out") if name == "adapter" else ():
            parser.add_argument(option)
    options = what.parse_args(arguments)
    try:
        if options.command == "engine":
            with _lock():
                _say(f"{os.path.relpath(archive(), ROOT)} is ready")
        elif options.command == "ext":
            _say(f"{extension(ROOT / 'fserver').relative_to(ROOT)} is ready")
            sdk(ROOT / "fserver")
        elif options.command == "adapter":
            print(adapter(options.torch, options.out))
        else:
            print(needs.find_go())
    except BuildError as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
