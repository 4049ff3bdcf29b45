"""Parser of HTML pages of the web UI."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

import httpx
from starlette.applications import Starlette

#: Elements without an end tag.
VOID = {"meta", "link", "input", "br", "hr", "img"}


@dataclass
class Page:
    """A parsed page.

    Attributes:
        headings: Tag and text of h1 and h2 elements, in order.
        tables: Rows of cells, by caption.
        links: URLs by link text; the last one of links with the same text.
        text: All text of the page.
        elements: Tag, attributes and text of every element.
    """

    headings: list[tuple[str, str]] = field(default_factory=list)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    text: str = ""
    elements: list[tuple[str, dict[str, str | None], str]] = field(default_factory=list)

    def named(self, name: str) -> list[tuple[dict[str, str | None], str]]:
        """Return attributes and text of the elements with a tag."""
        return [(attributes, text) for tag, attributes, text in self.elements if tag == name]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self.open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.rows: list[list[str]] = []
        self.caption = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append((tag, dict(attrs), []))
        else:
            self.page.elements.append((tag, dict(attrs), ""))
        if tag == "table":
            self.rows = []
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data: str) -> None:
        for _, _, parts in self.open:
            parts.append(data)

    def handle_endtag(self, tag: str) -> None:
        name, attributes, parts = self.open.pop()
        assert name == tag, (name, tag)  # elements must be closed in order
        text = "".join(parts)
        short = " ".join(text.split())
        self.page.elements.append((name, attributes, text))
        match name:
            case "h1" | "h2":
                self.page.headings.append((name, short))
            case "a":
                self.page.links[short] = attributes.get("href") or ""
            case "td" | "th":
                self.rows[-1].append(short)
            case "caption":
                self.caption = short
            case "table":
                self.page.tables[self.caption] = self.rows
            case "html":
                self.page.text = text


def read(html: str) -> Page:
    """Parse a page and check that its elements are closed in order."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert not reader.open, reader.open
    page = reader.page
    assert [name for name, _ in page.headings].count("h1") == 1
    assert all(caption for caption in page.tables)
    assert not [it for it in page.elements if "style" in it[1] or it[0] == "style"]
    return page


def decode_bytes(browser: httpx.AsyncClient) -> None:
    """Let the web UI decode tokens as bytes; ids above 255 decode to nothing."""
    transport = browser._transport
    assert isinstance(transport, httpx.ASGITransport)
    assert isinstance(transport.app, Starlette)
    transport.app.state.decode = lambda ids: bytes(it for it in ids if it < 256).decode(
        "utf-8", "replace"
    )
