"""The part of the packaging that pyproject.toml cannot say: the extension and its adapters."""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.dist_info import dist_info
from setuptools.command.sdist import sdist

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
import builder  # noqa: E402  (tools/ is no package)
import needs  # noqa: E402


class Describe(dist_info):
    """Stops before anything that is required is fetched or built: on a system that fserver does
    not run on, where there is no torch to build for, and where the compilers are missing."""

    def run(self) -> None:
        with needs.one_line():
            needs.need_all()
        super().run()


class Source(sdist):
    """A source archive builds without network for Go: it has the modules. It also names its
    commit."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        with needs.one_line():
            builder.source(Path(base_dir).resolve())


class BuildPackage(build_py):
    """Into a wheel go the examples too, which `fserver demo` runs."""

    def run(self) -> None:
        if self.editable_mode:
            return super().run()
        shutil.rmtree(self.build_lib, ignore_errors=True)  # modules that are gone
        super().run()
        examples = Path(self.build_lib) / "fserver/examples/afd"
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(builder.ROOT / "examples/afd", examples, ignore=skip)


class BuildExtension(build_ext):
    """Lets tools/builder.py do the work, into the tree or into the wheel."""

    def run(self) -> None:
        root = builder.ROOT if self.inplace else Path(self.build_lib)
        with needs.one_line():
            builder.extension(root / "fserver")
            builder.sdk(root / "fserver")


def build_requirements() -> list[str]:
    """What an isolated build needs beside pyproject.toml: a Go toolchain, unless there is one."""
    try:
        if not needs.prebuilt():
            needs.find_go()
    except needs.BuildError:
        return (builder.ROOT / "requirements/go.txt").read_text().splitlines()[-1:]
    return []


setup(
    ext_modules=[Extension("fserver._C", sources=[])],
    cmdclass={
        "build_ext": BuildExtension,
        "build_py": BuildPackage,
        "dist_info": Describe,
        "sdist": Source,
    },
    setup_requires=build_requirements(),
)
