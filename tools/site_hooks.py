"""Hooks of mkdocs.yml. The pages of docs/ link to each other as files, so that the links also work
in the repository. The functions here make these links fit for the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

# Pages of the site that are files of the repository's root.
FROM_ROOT = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
# A block of code, a link, or words between backticks, in which there is no link.
PART = re.compile(
    r"^`{3,}.*?^`{3,}\s*$|(?<!!)\[([^\]]+)\]\(([^)\s]+)\)|`[^`\n]+`", re.DOTALL | re.MULTILINE
)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Takes the text of CHANGELOG.md and CONTRIBUTING.md from the root. A link to a file outside
    docs/ becomes its text. A link to a folder in docs/ becomes one to the folder's README.md."""
    source = FROM_ROOT.get(page.file.src_uri)
    root = Path(config.config_file_path).parent
    if source and (root / source).exists():
        markdown = (root / source).read_text(encoding="utf-8")
    folder = posixpath.dirname(source or f"docs/{page.file.src_uri}")
    here = posixpath.dirname(f"docs/{page.file.src_uri}")

    def fit(match: re.Match[str]) -> str:
        text, target = match.groups()
        if text is None or ":" in target or target.startswith(("#", "/")):
            return match.group()
        path, hash_, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, path))
        if (root / path).is_dir() and path.startswith("docs/"):
            path += "/README.md"
        if (root / path).exists() and not path.startswith("docs/"):
            return text
        return f"[{text}]({posixpath.relpath(path, here)}{hash_}{anchor})"

    return PART.sub(fit, markdown)
