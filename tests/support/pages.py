"""What a page says, read as a browser would."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

import httpx
from starlette.applications import Starlette

#: Elements that have no end.
VOID = {"meta", "link", "input", "br", "hr", "img"}


@dataclass
class Page:
    """A page.

    Attributes:
        headings: What its h1 and h2 say, in order.
        tables: Rows of cells, by caption.
        links: Where they lead, by what they say; the last of those that say the same.
        text: All that it says.
        elements: Each that there is, with its attributes and what it says.
    """

    headings: list[tuple[str, str]] = field(default_factory=list)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    text: str = ""
    elements: list[tuple[str, dict[str, str | None], str]] = field(default_factory=list)

    def named(self, name: str) -> list[tuple[dict[str, str | None], str]]:
        """Elements of a name: their attributes, and what they say."""
        return [(attributes, said) for tag, attributes, said in self.elements if tag == name]


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
        for _, _, said in self.open:
            said.append(data)

    def handle_endtag(self, tag: str) -> None:
        name, attributes, parts = self.open.pop()
        assert name == tag, (name, tag)  # what is not closed in order may be anything
        said = "".join(parts)
        short = " ".join(said.split())
        self.page.elements.append((name, attributes, said))
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
                self.page.text = said


def read(html: str) -> Page:
    """A page, which closes what it opens, in order."""
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
    """Have the pages decode tokens, as if they were bytes; what is none says nothing."""
    transport = browser._transport
    assert isinstance(transport, httpx.ASGITransport)
    assert isinstance(transport.app, Starlette)
    transport.app.state.decode = lambda ids: bytes(it for it in ids if it < 256).decode(
        "utf-8", "replace"
    )
