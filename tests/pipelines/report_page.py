"""The page of a report, read as a browser and a screen reader do."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser

HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")


class Page(HTMLParser):
    """What is open must be closed, what is text is text, and everything has its name."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.headings: list[str] = []
        self.titles: list[str] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        assert self.tags["title"] == 1 + self.tags["svg"] == 1 + len(self.titles)
        assert self.tags["main"] == self.tags["h1"] == 1
        assert self.headings[0] == "h1"
        assert all(int(b[1]) <= int(a[1]) + 1 for a, b in zip(self.headings, self.headings[1:], strict=False))
        assert all(title.strip() for title in self.titles)
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        has = dict(attrs)
        self.ids += [has["id"] or ""] if "id" in has else []
        assert not any(k.startswith("on") or k in ("src", "href") for k in has), attrs
        assert (has.get("xlink:href") or "#").startswith("#"), "a part of this page"
        if tag == "html":
            assert has["lang"] == "en"
        if tag == "svg":
            assert has["role"] == "img"
        if tag == "th":
            assert has["scope"] == "col"
        if tag in ("svg", "table"):
            assert self.open[-1] == "div", "it scrolls on its own, not the page"
        if has.get("class") == "wide":
            assert has["tabindex"] == "0", "else the keyboard cannot scroll it"
            assert has["aria-label"]
        if tag in HEADINGS:
            self.headings.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if "style" in self.open:
            assert "url(" not in data
            assert "@import" not in data
        if self.open[-2:] == ["svg", "title"]:
            self.titles.append(data)
