# SPDX-License-Identifier: Apache-2.0
"""A directive that lists the declarations of the C++ headers, with links to Doxygen's pages."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

TAGS = "build/docs/cpp.tag"  # GENERATE_TAGFILE of docs/Doxyfile
PAGES = "cpp"  # the last folder of its HTML_OUTPUT
INCLUDED_FROM = "/include/"

LISTED = ("function", "typedef", "enumeration", "variable", "define")


@dataclass(frozen=True)
class Link:
    """A name, and the Doxygen page that describes it."""

    name: str
    page: str


@dataclass(frozen=True)
class Header:
    """A header, by the path with which programs include it, and its declarations."""

    link: Link
    declared: tuple[Link, ...]


def headers_of(tags: Path) -> list[Header]:
    """Read a tag file of Doxygen.

    Args:
        tags: Path of the tag file.

    Returns:
        The headers, sorted by path. Each lists its classes, then its other names in the order of
        the tag file.

    Raises:
        ValueError: If there are no headers, or a header is not below a folder ``include``.
    """
    root = ElementTree.parse(tags).getroot()
    class_pages = {
        _text(compound, "name"): _text(compound, "filename")
        for compound in root.iter("compound")
        if compound.get("kind") in ("class", "struct", "union")
    }
    headers = []
    for compound in root.iter("compound"):
        if compound.get("kind") != "file":
            continue
        path = _text(compound, "path") + _text(compound, "name")
        _, found, included = path.partition(INCLUDED_FROM)
        if not found:
            raise ValueError(f"tags: expected headers below {INCLUDED_FROM}, got {path}")
        classes = [_class_link(item.text or "", class_pages) for item in compound.iter("class")]
        link = Link(included, _page(_text(compound, "filename")))
        headers.append(Header(link, (*classes, *_members(compound))))
    if not headers:
        raise ValueError(f"tags: expected headers, got none in {tags}")
    return sorted(headers, key=lambda header: header.link.name)


def _members(compound: ElementTree.Element) -> Iterator[Link]:
    seen = set()
    for member in compound.iter("member"):
        name = _text(member, "name")
        if member.get("kind") in LISTED and name not in seen:  # overloads share a name
            seen.add(name)
            yield Link(name, f"{_page(_text(member, 'anchorfile'))}#{_text(member, 'anchor')}")


def _class_link(name: str, pages: dict[str, str]) -> Link:
    return Link(name.removeprefix("normscope::"), _page(pages[name]))


def _page(file: str) -> str:
    return file if file.endswith(".html") else f"{file}.html"


def _text(element: ElementTree.Element, tag: str) -> str:
    return element.findtext(tag) or ""


class CppHeaders(SphinxDirective):  # type: ignore[misc] # it is Any if Sphinx is not installed
    """A directive with a section per folder, which lists headers and links to declarations."""

    def run(self) -> list[nodes.Node]:
        """Make the sections."""
        tags = Path(self.env.srcdir, TAGS)
        self.env.note_dependency(str(tags))
        root = "../" * self.env.docname.count("/") + PAGES
        sections: dict[str, nodes.bullet_list] = {}
        made: list[nodes.Node] = []
        for header in headers_of(tags):
            folder = header.link.name.rpartition("/")[0]
            if folder not in sections:
                sections[folder] = nodes.bullet_list()
                section = nodes.section(ids=[nodes.make_id(folder)])
                section += nodes.title(text=folder)
                section += sections[folder]
                made.append(section)
            paragraph = nodes.paragraph("", "", _reference(header.link, root))
            for i, link in enumerate(header.declared):
                paragraph += nodes.Text(", " if i else ": ")
                paragraph += _reference(link, root)
            sections[folder] += nodes.list_item("", paragraph)
        return made


def _reference(link: Link, root: str) -> nodes.reference:
    code = nodes.literal(text=link.name)
    return nodes.reference("", "", code, refuri=f"{root}/{link.page}", internal=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive ``cpp-headers``."""
    app.add_directive("cpp-headers", CppHeaders)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
