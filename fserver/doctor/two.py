"""Tests whether one process of this user may write into the memory of another. The engine, which
starts no process, names the test that a transport needs (engine/transport/driver.go)."""

import ctypes
import errno
import os
import subprocess
import sys

# The child writes eight bytes to an address of its parent and prints the errno. That is the
# direction that counts: the kernel lets a parent write into its own children more easily than
# two processes that were started side by side into each other.
_CHILD = """
import ctypes, sys
class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
data = ctypes.create_string_buffer(b"fserver!", 8)
mine, theirs = Iovec(ctypes.addressof(data), 8), Iovec(int(sys.argv[2]), 8)
one = ctypes.c_ulong(1)
write = libc.process_vm_writev
write.restype = ctypes.c_ssize_t
done = write(int(sys.argv[1]), ctypes.byref(mine), one, ctypes.byref(theirs), one, ctypes.c_ulong())
print(0 if done == 8 else ctypes.get_errno() or -1)
"""

WRITES_PERMITTED = "process_vm_writev, PR_SET_PTRACER"
_PR_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)


def permitted() -> tuple[str, int]:
    """Returns ("plain", 0) if it works, ("ptracer", 0) if it works after the target has allowed it,
    as the engine does, else ("", errno). An errno of -1 means that the bytes did not arrive."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = _try()
    if code == 0:
        return "plain", 0
    if code == errno.EPERM and libc.prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0) == 0:
        try:
            if _try() == 0:
                return "ptracer", 0
        finally:
            libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(0), 0, 0, 0)
    return "", code


def test(name: str, otherwise: str) -> tuple[bool, str, str]:
    """Runs the test of this name. Returns whether it succeeds, the finding and the remedy.
    `otherwise` is the remedy if only the other test would succeed."""
    way, code = permitted()
    if way == "plain":
        return True, "processes of this user can write into each other's memory", ""
    if way == "ptracer":
        text = "processes of this user can write into the memory of those that permit it"
        return name == WRITES_PERMITTED, f"{text} (PR_SET_PTRACER)", otherwise
    if code == errno.ENOSYS:
        text = "this kernel has no process_vm_writev, or a sandbox forbids it"
        return False, text, "in a container, use a seccomp profile that allows process_vm_writev"
    if code > 0:
        remedy = "set sysctl kernel.yama.ptrace_scope=1; in a container also --cap-add SYS_PTRACE"
        return False, f"process_vm_writev fails: {os.strerror(code)}", remedy
    remedy = f"run `{sys.executable} -I -S -c pass` and correct what it reports"
    return False, "a child process did not write into the memory of this process", remedy


def _try() -> int:
    data = ctypes.create_string_buffer(8)
    # -I -S: quick to start, and nothing of the environment's matters.
    command = [sys.executable, "-I", "-S", "-c", _CHILD, str(os.getpid())]
    try:
        done = subprocess.run(
            [*command, str(ctypes.addressof(data))], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return -1
    code = int(done.stdout) if done.stdout.strip().lstrip("-").isdecimal() else -1
    return -1 if code == 0 and data.raw != b"fserver!" else code
