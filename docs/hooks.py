"""Hooks for mkdocs: adds the repository's READMEs as pages, and converts links.

Links between Markdown files also work in the repository. Links to other files become plain names.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
UNDER = "repository/"  # the site's folder for files of the repository
FOLDERS = ("", "configs", "launch", "ascend", "perf", "retool_mcore/*")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
PICTURES = (".png", ".svg")


def repository_pages() -> dict[str, Path]:
    """Path in the site -> file in the repository."""
    found = [path for folder in FOLDERS for path in sorted(ROOT.glob(f"{folder}/*.md" if folder else "*.md"))]
    return {f"{UNDER}{path.relative_to(ROOT).as_posix()}": path for path in found}


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for src, path in repository_pages().items():
        files.append(File.generated(config, src, content=path.read_text(encoding="utf-8")))
    for path in sorted(ROOT.glob("perf/pictures/*")):
        src = f"{UNDER}{path.relative_to(ROOT).as_posix()}"
        files.append(File.generated(config, src, content=path.read_bytes()))
    for script in ("hooks.py", "pictures.py"):
        files.remove(files.get_file_from_path(script))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return convert_links(markdown, page.file.src_uri)


def source_of(src: str) -> str:
    """The path in the repository of a page in the site."""
    return src.removeprefix(UNDER) if src.startswith(UNDER) else f"docs/{src}"


def convert_links(markdown: str, src: str) -> str:
    """Convert links to paths in the site. Raises ValueError for a broken link."""
    pages, own = repository_pages(), source_of(src)

    def link(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(own), target))
        if not (ROOT / path).exists():
            raise ValueError(f"{own}: the link {target} is broken")
        if path.startswith("docs/") and path.endswith(".md"):
            there = path.removeprefix("docs/")
        elif f"{UNDER}{path}" in pages or path.endswith(PICTURES):
            there = f"{UNDER}{path}"
        else:
            return f"{text} (`{path}`)" if path not in text else text  # the file is not a page
        return f"{picture}[{text}]({posixpath.relpath(there, posixpath.dirname(src) or '.')}{anchor or ''})"

    parts = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)
