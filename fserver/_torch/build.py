"""How an adapter is compiled. `tools/builder.py` and the loader use this file, so it imports only
the standard library.

An adapter is compiled from ``adapter.cc`` in this folder, for one minor version of torch and one
Python. This needs a C++ compiler, the headers of that Python, and torch with its headers.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "adapter.cc"
MIN_TORCH = (2, 11)
LEAST = ".".join(map(str, MIN_TORCH))

_COMPILE = ["-O2", "-fPIC", "-fvisibility=hidden", "-D_GLIBCXX_USE_CXX11_ABI=1"]
_LINK = ["-shared", "-Wl,--as-needed", "-Wl,--strip-debug", "-Wl,-z,text"]
_LIBRARIES = ["-ltorch_python", "-ltorch_cpu", "-lc10"]


def minor(version: str) -> tuple[int, int]:
    """Returns (2, 15) for "2.15.0a0+git123"."""
    major, rest = version.split(".")[:2]
    return int(major), int(rest)


def file_name(version: str, suffix: str | None = None) -> str:
    """Returns the file name of the adapter for a torch and a Python: "2_15.cpython-311-….so".

    Args:
        version: a version of torch. Only the first two numbers matter.
        suffix: EXT_SUFFIX of the Python. None: this Python.
    """
    return "{}_{}".format(*minor(version)) + (suffix or sysconfig.get_config_var("EXT_SUFFIX"))


def identity(header: Path) -> str:
    """Returns the digest of an adapter's sources, 16 hexadecimal digits.

    Args:
        header: fserver.h, which the adapter includes.
    """
    digest = hashlib.sha256()
    for path in (SOURCE, HERE / "adapter.h", header):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def literal(header: Path) -> str:
    """Returns the value of FS_ADAPTER, which is equal in an extension and an adapter that fit."""
    return f"0x{identity(header)}ULL"


def compile_flags(header: Path) -> list[str]:
    """Returns the compiler's flags with CXXFLAGS, except those of `includes` and the names of
    files. CXXFLAGS, as conda sets it, may name another standard, so ours comes last."""
    flags = [*_COMPILE, f"-DFS_ADAPTER={literal(header)}", f"-I{HERE}", f"-I{header.parent}"]
    return [*flags, *shlex.split(os.environ.get("CXXFLAGS", "")), "-std=c++20"]


def includes(torch: Path, python: Path) -> list[str]:
    """Returns the compiler's flags for the headers of torch and Python.

    Args:
        torch: the folder of the package torch.
        python: the folder of Python.h.
    """
    headers = (torch / "include", torch / "include/torch/csrc/api/include", python)
    return [word for path in headers for word in ("-isystem", str(path))]


def link_flags(torch: Path) -> list[str]:
    """Returns the linker's flags. They have to come after the names of files."""
    exports = f"-Wl,--version-script={HERE / 'exports.map'}"
    return [*_LINK, exports, f"-L{torch / 'lib'}", *_LIBRARIES]
