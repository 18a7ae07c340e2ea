import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))

if not __package__ and "fserver" not in sys.modules:  # started by its path, see command.py
    sys.path[:] = [folder for folder in sys.path if folder != HERE]
    spec = importlib.util.spec_from_file_location("fserver", f"{HERE}/__init__.py")
    assert spec and spec.loader
    package = sys.modules["fserver"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)

from fserver.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
