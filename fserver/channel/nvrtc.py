"""Compiles the kernels of stream channels for this GPU, with the NVRTC that torch ships."""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import os
import re
import threading

from fserver.errors import ConfigError, Error

_lock = threading.Lock()


def _candidates() -> list[str]:
    """Returns the places to look for NVRTC: loaded or on the system, in NVIDIA's wheels, in torch's
    folder. The version of the CUDA that torch was built with comes first, because the installed
    driver may reject the code of a newer NVRTC."""
    import torch

    own = (torch.version.cuda or "13").partition(".")[0]
    found: list[str] = []
    for package, pattern in (
        ("nvidia", "cu*/lib/libnvrtc.so.*"),
        ("nvidia", "cuda_nvrtc/lib/libnvrtc.so.*"),
        ("torch", "lib/libnvrtc*.so*"),
    ):
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            found += sorted(glob.glob(os.path.join(place, pattern)), reverse=True)
    found = [path for path in found if "builtins" not in path and "alt" not in path]
    names = [f"libnvrtc.so.{major}" for major in dict.fromkeys((own, "13", "12"))]

    def foreign(path: str) -> bool:
        major = re.search(r"\.so\.(\d+)", path)
        return major is not None and major[1] != own

    return sorted(names + found, key=foreign)


@functools.cache
def _library() -> ctypes.CDLL:
    tried = []
    for name in _candidates():
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            tried.append(str(error))
    raise ConfigError(
        "channel: mode='kernel' needs the NVRTC library to compile its kernels, but it cannot be "
        f"loaded: {'; '.join(tried) or 'no library found'} (run pip install nvidia-cuda-nvrtc, or "
        "use mode='copy')"
    )


def _compile(library: ctypes.CDLL, source: str, target: str) -> tuple[bytes | None, str]:
    """Returns the image for a target (``sm_90``: machine code, ``compute_90``: PTX), or None and
    the reason."""
    program = ctypes.c_void_p()
    if library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"channel.cu", 0, None, None
    ):
        return None, "nvrtcCreateProgram failed"
    try:
        options = [f"--gpu-architecture={target}".encode(), b"--std=c++17"]
        array = (ctypes.c_char_p * len(options))(*options)
        result = library.nvrtcCompileProgram(program, len(options), array)
        size = ctypes.c_size_t()
        if result:
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value or 1)
            library.nvrtcGetProgramLog(program, log)
            return None, f"{target}: error {result}: {log.value.decode(errors='replace').strip()}"
        kind = "CUBIN" if target.startswith("sm_") else "PTX"
        getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{kind}")(program, image)
        return image.raw, ""
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def image(source: str, arch: int) -> bytes:
    """Returns the kernels for a GPU of compute capability ``arch`` (90 for 9.0). They are compiled
    once.

    Raises:
        ConfigError: NVRTC is not installed, or the GPU is too old.
        Error: NVRTC cannot compile for this GPU.
    """
    if arch < 70:
        raise ConfigError(
            "channel: mode='kernel' needs a GPU of compute capability 7.0 or later, but this GPU "
            f"has {arch / 10}: use mode='copy'"
        )
    with _lock:
        library = _library()
        failures = []
        # A GPU that is newer than NVRTC gets PTX, which the driver compiles.
        for target in (f"sm_{arch}", "compute_90", "compute_70"):
            if target.startswith("compute_") and int(target[8:]) > arch:
                continue
            code, why = _compile(library, source, target)
            if code is not None:
                return code
            failures.append(why)
    raise Error(
        f"channel: NVRTC cannot compile the kernels of mode='kernel': {'; '.join(failures)} (use "
        "mode='copy')"
    )
