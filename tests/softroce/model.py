"""Writes the demo's packaged model as a folder, which processes load in no time: to read its GGUF
file would take the emulated machine many minutes.

    model.py FOLDER
"""

import sys
from pathlib import Path

from fserver import demo

folder = Path(sys.argv[1])
if not (folder / "config.json").exists():
    with demo._gguf_read_once():
        afd = demo._load_module(demo._examples() / "model.py")
        demo._save(*afd.load(demo._packaged_model()), folder)
