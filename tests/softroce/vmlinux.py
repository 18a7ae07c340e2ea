"""Takes the uncompressed kernel out of a bzImage.

    python3 vmlinux.py BZIMAGE VMLINUX

QEMU starts such a file directly (PVH). In an emulated machine the kernel would take seconds to
unpack itself.
"""

import lzma
import pathlib
import struct
import subprocess
import sys
import zlib

# Fields of the header that "The Linux/x86 Boot Protocol" describes.
SETUP_SECTORS = 0x1F1
MAGIC = 0x202
PAYLOAD = 0x248


def payload(image: bytes) -> bytes:
    """Returns the compressed kernel that a bzImage holds."""
    if image[MAGIC : MAGIC + 4] != b"HdrS":
        raise ValueError("not a bzImage: it has no HdrS header")
    offset, length = struct.unpack_from("<II", image, PAYLOAD)
    start = ((image[SETUP_SECTORS] or 4) + 1) * 512 + offset
    return image[start : start + length]


def unpack(packed: bytes) -> bytes:
    """Unpacks a kernel; four bytes that hold its length follow the compressed data."""
    if packed.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMADecompressor().decompress(packed)
    if packed.startswith(b"\x1f\x8b"):
        return zlib.decompressobj(31).decompress(packed)
    if packed.startswith(b"\x28\xb5\x2f\xfd"):
        # zstd complains of the length at the end, after it has written everything.
        return subprocess.run(["zstd", "-dcq"], input=packed, stdout=subprocess.PIPE).stdout
    raise ValueError(f"packed in an unknown way: {packed[:6].hex()}")


def main() -> int:
    source, target = map(pathlib.Path, sys.argv[1:3])
    kernel = unpack(payload(source.read_bytes()))
    if not kernel.startswith(b"\x7fELF"):
        raise ValueError(f"{source}: what was unpacked is not an ELF file")
    target.write_bytes(kernel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
