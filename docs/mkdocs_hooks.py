"""The site from the repository: README.md is its home page, and links to files outside docs/ become text."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]+)?\)")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    readme = Path(config.config_file_path).with_name("README.md").read_text("utf-8")
    files.append(File.generated(config, "index.md", content=_links(readme, "")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return markdown if page.file.src_uri == "index.md" else _links(markdown, posixpath.join("docs", page.file.src_uri))


def _links(text: str, document: str) -> str:
    """The links of a document, by its path in the repository ("" is README.md), as the site has them."""

    def link(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(document), target))
        if path == "README.md":
            path = "docs/index.md"
        if not path.startswith("docs/"):
            return label
        return f"[{label}]({posixpath.relpath(path, posixpath.dirname(document) or 'docs')}{anchor})"

    text = _LINK.sub(link, text)
    return text if document else text.replace("](docs/images/", "](images/")
