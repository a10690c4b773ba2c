"""What the site has beside docs/: README as its start, other files of the repository, the API.

Documents link each other as they lie in the repository, so that links work there, too; `placed`
says where each lies in the site. mkdocs.yml names this file.
"""

from __future__ import annotations

import posixpath
import re
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts import public_api

ROOT = Path(__file__).resolve().parent.parent
MOVED = {"README.md": "index.md", "SECURITY.md": "reporting.md"}
"""Documents that have another name in the site."""
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "bench/README.md",
    "changelog.d/README.md",
)
"""Documents that lie elsewhere than in docs/."""
FOLDERS = {"bench/results": "bench/results/index.md", "examples": "examples/index.md"}
"""Folders that documents link: a page with the list of their files stands for each."""
SHOWN = (".json", ".png", ".py", ".svg")
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)\s#]+)")
_sources = tempfile.TemporaryDirectory(prefix="kvmig-docs-")


def placed(path: str) -> str:
    """Where a file or folder of the repository lies in the site."""
    return MOVED.get(path) or FOLDERS.get(path) or path.removeprefix("docs/")


def target(link: str, path: str) -> str:
    """What a link of the repository's file `path` means: a path from its root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def linked(text: str, path: str) -> str:
    """The Markdown of the repository's file `path`, with links as they are in the site."""
    here = posixpath.dirname(placed(path)) or "."

    def replace(link: re.Match[str]) -> str:
        return link[1] + posixpath.relpath(placed(target(link[2], path)), here)

    return LINK.sub(replace, text)


def elsewhere() -> set[str]:
    """Files that documents link and that are no documents themselves: the site has copies."""
    documents = [*PAGES, *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))]
    found = {
        target(link[2].split("#")[0], path)
        for path in documents
        for link in LINK.finditer((ROOT / path).read_text())
    }
    return {path for path in found - {*PAGES} if is_elsewhere(path)}


def is_elsewhere(path: str) -> bool:
    """A file of the repository outside docs/."""
    return (ROOT / path).is_file() and not path.startswith(("docs/", "../"))


def reference(page: str, entries: tuple[str, ...]) -> str:
    """One page of the API reference."""
    lines = [f"# API: {page.replace('-', ' ')}\n"]
    for entry in entries:
        path, names = public_api.parsed(entry)
        lines.append(f"## `{path}`\n")
        if names:
            lines += [f"::: {path}.{name}\n" for name in names]
        else:
            lines.append(f"::: {path}\n    options:\n      show_root_heading: false\n")
    return "\n".join(lines)


def shown(folder: str) -> list[str]:
    """The files of a folder, by their paths in the repository."""
    files = sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in SHOWN)
    return [path.relative_to(ROOT).as_posix() for path in files]


def listing(folder: str) -> str:
    """The page that stands for a folder."""
    here = posixpath.dirname(FOLDERS[folder])
    links = [f"- [{name}]({posixpath.relpath(name, here)})" for name in shown(folder)]
    return "\n".join([f"# {folder}\n", *links])


@event_priority(100)  # before mkdocstrings reads its configuration
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let the API reference be read from the sources, see `public_api.copy_sources`."""
    folder = Path(_sources.name)
    if not (folder / "kvmig").exists():
        public_api.copy_sources(folder)
    handlers: dict[str, Any] = config.plugins["mkdocstrings"].config["handlers"]
    handlers["python"]["paths"] = [str(folder)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies elsewhere, and what is made here."""
    listed = {name for folder in FOLDERS for name in shown(folder)}
    for path in sorted({*PAGES, *elsewhere(), *listed}):
        files.append(File.generated(config, placed(path), abs_src_path=str(ROOT / path)))
    for folder, page in FOLDERS.items():
        files.append(File.generated(config, page, content=listing(folder)))
    for page, entries in public_api.PAGES.items():
        content = reference(page, entries)
        files.append(File.generated(config, f"api/{page}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are in the site."""
    file = page.file
    if file.abs_src_path is None:
        return markdown  # made here
    return linked(markdown, Path(file.abs_src_path).relative_to(ROOT).as_posix())


def on_shutdown() -> None:
    """Remove the copied sources."""
    _sources.cleanup()
