"""Pieces of HTML: tables, names from the data, figures with legends, numbers for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from postbus.pipelines._report_plots import Plot

ROWS = 50  # of a table
NAME = 120  # letters of a name

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c1c1c; --soft: #666; --rule: #ddd; }
@media (prefers-color-scheme: dark) {
  :root { --back: #16181b; --text: #e6e6e6; --soft: #a0a0a0; --rule: #3a3d42; }
}
body { background: var(--back); color: var(--text); font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto;
  max-width: 64rem; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; } p.soft, figcaption, dt { color: var(--soft); }
dl { display: flex; flex-wrap: wrap; gap: .5rem 2.5rem; } dd { font-size: 1.6rem; margin: 0; }
figure { margin: 1rem 0; } svg { display: block; height: auto; min-width: 40rem; width: 100%; }
ul.legend { display: flex; flex-wrap: wrap; gap: 0 1.2rem; list-style: none; margin: 0; padding: 0; }
ul.legend span { border-radius: 2px; display: inline-block; height: .7em; margin-right: .4em; width: .7em; }
div.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--rule); padding: .2rem .6rem; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.name { min-width: 8em; overflow-wrap: anywhere; } td.name:last-child { min-width: 14em; }
time, span.share { white-space: nowrap; }
span.bar { background: #3b7dd8; display: inline-block; height: .7em; margin-right: .5em; }
"""


def figure(plot: Plot, caption: str) -> str:
    """A plot with its legend; the caption is HTML."""
    entries = "".join(
        f'<li><span style="background:{colour}"></span>{name_of(name)}</li>' for colour, name in plot.legend
    )
    legend = f'<ul class="legend">{entries}</ul>' if len(plot.legend) > 1 else ""
    only = f" All of {name_of(plot.legend[0][1])}." if len(plot.legend) == 1 else ""
    return f"<figure>{_wide('plot', plot.svg)}{legend}<figcaption>{caption}{only}</figcaption></figure>"


def table(label: str, heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int]) -> str:
    """A table; cells are HTML, and those of the columns `numbers` are numbers."""
    right = set(numbers)
    kind = [' class="number"' if i in right else ' class="name"' for i in range(len(heads))]
    top = "".join(f'<th scope="col"{kind[i] if i in right else ""}>{h}</th>' for i, h in enumerate(heads))
    lines: list[str] = []
    left_out = 0
    for row in rows:
        if len(lines) < ROWS:
            lines.append("<tr>" + "".join(f"<td{kind[i]}>{c}</td>" for i, c in enumerate(row)) + "</tr>")
        else:
            left_out += 1
    more = f'<p class="soft">And {left_out:,} more.</p>' if left_out else ""
    whole = f"<table><thead><tr>{top}</tr></thead><tbody>\n{chr(10).join(lines)}\n</tbody></table>"
    return f"{_wide(label, whole)}{more}"


def _wide(label: str, content: str) -> str:
    """What scrolls sideways where the window is narrow, with the arrow keys too."""
    return f'<div class="wide" tabindex="0" role="group" aria-label="{label}">{content}</div>'


def name_of(text: str) -> str:
    """A name from the data: escaped, not too long, with letters that can be seen, in its own direction."""
    short = text if len(text) <= NAME else f"{text[:NAME]}..."
    seen = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in short)
    return f"<bdi>{escape(seen)}</bdi>" if seen else ""


def number(value: int | None) -> str:
    """A count, or nothing where it is not known."""
    return "" if value is None else f"{value:,}"


def share(part: float) -> str:
    """A part of a whole, as a bar."""
    return f'<span class="share"><span class="bar" style="width:{part * 10:.2f}em"></span>{part:.1%}</span>'


def stamp(at: datetime) -> str:
    """A time."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def when(at: datetime) -> str:
    """A time as HTML, on one line."""
    return f'<time datetime="{stamp(at)}Z">{stamp(at)}</time>'


def span(seconds: float) -> str:
    """How long something took, to two figures or so."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    units: Mapping[str, int] = {"d": 86400, "h": 3600, "min": 60, "s": 1}
    rest, parts = round(seconds), []
    for unit, size in units.items():
        if rest >= size:
            parts.append(f"{rest // size} {unit}")
            rest %= size
    return " ".join(parts[:2])


def pace(per_second: float) -> str:
    """How many in a second, a minute or an hour: whichever has a figure before the point."""
    for unit, size in (("s", 1), ("min", 60)):
        if per_second * size >= 1:
            return f"{per_second * size:,.1f}/{unit}"
    return f"{per_second * 3600:,.1f}/h"
