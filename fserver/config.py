"""`fserver config`: what compiles and links programs in C and C++ with this installation."""

import argparse
import re
import shlex
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parent


def main(argv: list[str]) -> int:
    """Prints the options that are asked for, in one line. Returns 1 where the installation has no
    files for C and C++.
    """
    parser = argparse.ArgumentParser(
        prog="fserver config",
        description="Prints what compiles and links programs in C and C++ with this installation.",
        epilog="c++ -std=c++17 main.cc $(fserver config --cflags --libs); "
        'cmake -Dfserver_DIR="$(fserver config --cmake)"; '
        'PKG_CONFIG_PATH="$(fserver config --pkgconfig)". If its folder has a blank or a character '
        'that the shell interprets: eval "c++ main.cc $(fserver config --cflags --libs)"',
    )
    parser.add_argument("--cflags", action="store_true", help="print the compiler's options")
    parser.add_argument("--libs", action="store_true", help="print the linker's options")
    parser.add_argument(
        "--archive",
        action="store_true",
        help="with --libs: link the archive, so that the program runs without this installation",
    )
    parser.add_argument("--cmake", action="store_true", help="print the folder for fserver_DIR")
    parser.add_argument(
        "--pkgconfig", action="store_true", help="print the folder for PKG_CONFIG_PATH"
    )
    options = parser.parse_args(argv)
    if not (options.cflags or options.libs or options.cmake or options.pkgconfig):
        parser.error("nothing is asked for: want --cflags, --libs, --cmake or --pkgconfig")
    if not (HOME / "lib/libfserver.so").is_file():
        print(f"fserver: {HOME / 'lib'} has no libraries (make ext builds them)", file=sys.stderr)
        return 1
    words = _words(options)
    if options.cflags or options.libs or len(words) > 1:
        words = [_quoted(word) for word in words]
    print(*words)  # a single folder as it is, for "$(...)"
    return 0


def _quoted(word: str) -> str:
    """A shell splits the output of $(...) at blanks, and takes quotes as they are: only words that
    cannot be used so anyway are quoted, for eval."""
    return shlex.quote(word) if re.search(r"""[\s"'`$&|;<>()\\*?\[\]{}!#]""", word) else word


def _words(options: argparse.Namespace) -> list[str]:
    lib = HOME / "lib"
    words = []
    if options.cflags:
        words.append(f"-I{HOME / 'include'}")
    if options.libs and options.archive:
        words += [str(lib / "libfserver.a"), "-lresolv", "-ldl", "-pthread"]
    elif options.libs:
        words += [f"-L{lib}", f"-Wl,-rpath,{lib}", "-lfserver", "-pthread"]
    if options.cmake:
        words.append(str(lib / "cmake/fserver"))
    if options.pkgconfig:
        words.append(str(lib / "pkgconfig"))
    return words
