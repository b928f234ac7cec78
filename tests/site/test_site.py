# SPDX-License-Identifier: Apache-2.0
"""Checks the site that `make docs` wrote to build/docs: it is complete, and no link is broken."""

from __future__ import annotations

import pkgutil
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import normscope

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build/docs/html"
HEADERS = ROOT / "build/install/include"

# What a browser loads by itself, unlike the links in <a>.
LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "object": "data"}

FROM_A_HOST = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')]+)""")


@dataclass
class Page(HTMLParser):
    """A page's anchors, which links can lead to, and its links."""

    anchors: set[str] = field(default_factory=set)
    followed: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag in ("a", "area") and "href" in values:
            self.followed.append(values["href"])
        if tag in LOADED and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])


@cache
def page(path: Path) -> Page:
    parsed = Page()
    parsed.feed(path.read_text())
    return parsed


def broken_links(site: Path) -> Iterator[str]:
    """Yield each link to a file or an anchor that the site does not have."""
    for path in sorted(site.rglob("*.html")):
        for link in page(path).followed + page(path).loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path.parent.joinpath(unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            is_page = target.suffix == ".html" and target.is_file()
            has_anchor = not is_page or unquote(parts.fragment) in {"", *page(target).anchors}
            if not target.is_relative_to(site.resolve()) or not target.is_file() or not has_anchor:
                yield f"{path.relative_to(site)}: {link}"


def from_elsewhere(site: Path) -> Iterator[str]:
    """Yield what pages and style sheets would load from another host."""
    for path in sorted(site.rglob("*.html")):
        for link in page(path).loaded:
            if urlsplit(link).netloc:
                yield f"{path.relative_to(site)}: {link}"
    for path in sorted(site.rglob("*.css")):
        for link in FROM_A_HOST.findall(path.read_text()):
            yield f"{path.relative_to(site)}: {link}"


# Their packages may be missing.
OF_OTHER_LIBRARIES = ("normscope.models.timm", "normscope.scopes.transformers")


def public_modules() -> Iterator[ModuleType]:
    """Yield the modules that list their public names."""
    yield normscope
    for found in pkgutil.walk_packages(normscope.__path__, "normscope."):
        if "._" in found.name or found.name in OF_OTHER_LIBRARIES:
            continue
        module = import_module(found.name)
        if hasattr(module, "__all__"):
            yield module


def public_names() -> list[set[str]]:
    """Return the names of everything public, each with all of its names."""
    names: dict[int, set[str]] = defaultdict(set)
    for module in public_modules():
        for name in module.__all__:
            names[id(getattr(module, name))].add(f"{module.__name__}.{name}")
    return list(names.values())


def inventory(site: Path) -> set[str]:
    """Return the Python names that the site describes."""
    head, _, body = (site / "objects.inv").read_bytes().partition(b"zlib.\n")
    assert b"version 2" in head
    lines = zlib.decompress(body).decode().splitlines()
    return {name for name, kind, *_ in map(str.split, lines) if kind.startswith("py:")}


def test_no_link_is_broken() -> None:
    assert list(broken_links(SITE)) == []


def test_nothing_is_loaded_from_another_host() -> None:
    assert list(from_elsewhere(SITE)) == []


def test_every_public_python_name_is_described() -> None:
    described = inventory(SITE)

    assert [sorted(names) for names in public_names() if not names & described] == []


def test_every_installed_header_is_listed() -> None:
    listed = (SITE / "docs/site/cpp.html").read_text()
    installed = [str(path.relative_to(HEADERS)) for path in HEADERS.rglob("*.h")]

    assert installed
    assert [header for header in installed if header not in listed] == []


def test_every_document_is_a_page() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/decisions/*.md")]
    pages = [SITE / path.relative_to(ROOT).with_suffix(".html") for path in documents]

    assert [str(path) for path in pages if not path.is_file()] == []
