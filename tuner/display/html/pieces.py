"""The HTML that every part of the report is built of: sections, plots, tiles, knobs as chips.

Every text that came from a user or a script is escaped here, and a figure's JSON cannot end the
script element that it stands in.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from tuner.formatting import knob_text, ordered_knobs
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knobs import KNOBS

if TYPE_CHECKING:
    import plotly.graph_objects as go

#: A longer list in "what was asked" (the clocks of a GPU) is written as its ends.
_MOST_ENTRIES = 24


def template(name: str) -> str:
    """Read one of the package's templates."""
    return (resources.files("tuner") / "templates" / name).read_text(encoding="utf-8")


def json_in_html(text: str) -> str:
    """JSON that cannot end its script element, whatever strings are in it: <, > and & occur only
    inside JSON strings, where they may be written as escapes."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def section(title: str, content: str, note: str = "") -> str:
    """Return a section of the page with its title and an optional note."""
    text = notes(note) if note else ""
    return f"<section>\n<h2>{title}</h2>\n{text}\n{content}\n</section>"


def plot_div(
    name: str, figure: go.Figure, alt: str, small: bool = False, height_px: int | None = None
) -> str:
    """Return an element that the page's script draws the figure into, with its data."""
    data = json_in_html(str(figure.to_json()))
    size = " small" if small else ""
    height = f' style="height: {height_px}px"' if height_px else ""
    return (
        f'<div class="plot{size}" id="plot-{name}" data-figure="figure-{name}" role="img" '
        f'aria-label="{escape(alt)}"{height}></div>\n'
        f'<script type="application/json" id="figure-{name}">{data}</script>'
    )


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    cards: bool = False,
    figures: Collection[int] = (),
    chosen: Callable[[int], bool] = lambda row: False,
) -> str:
    """Return a table of HTML cells, with columns of figures and highlighted rows by their numbers;
    as cards, each row becomes one on a phone."""
    kinds = [' class="n"' if i in figures else "" for i in range(len(heads))]
    body = ""
    for number, cells in enumerate(rows):
        tds = "".join(
            f'<td data-label="{head}"{kind}>{cell}</td>'
            for head, kind, cell in zip(heads, kinds, cells, strict=True)
        )
        body += f"<tr{' class=chosen' if chosen(number) else ''}>{tds}</tr>\n"
    head = "".join(f"<th>{head}</th>" for head in heads) if body else ""
    kind = ' class="cards"' if cards else ""
    return f"<table{kind}><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"


def folded(summary: str, content: str) -> str:
    """Return content that is shown when its summary is clicked."""
    return f"<details><summary>{summary}</summary>{content}</details>"


def notes(*texts: str) -> str:
    """Return short texts, a paragraph each."""
    return "".join(f'<p class="note">{text}</p>' for text in texts)


def muted(text: str) -> str:
    """Return a text in grey."""
    return f'<span class="muted">{text}</span>'


def prose(text: str) -> str:
    """Return a sentence as HTML; what stands between backticks is a command."""
    parts = escape(text).split("`")
    if len(parts) % 2 == 0:
        return "`".join(parts)
    return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(parts))


def estimated_mark(mark: str) -> str:
    """Return the mark of a meter behind a figure ("estimated", "twin"); "" if it was metered."""
    return f' <span class="estimated">{escape(mark)}</span>' if mark else ""


def chips(
    configuration: Configuration,
    names: Sequence[str] | None = None,
    against: Configuration | None = None,
) -> str:
    """Return the knobs as chips; those that differ from `against` are highlighted."""
    if names is None:
        names = ordered_knobs([configuration])
    shown = []
    for name in names:
        value = configuration.get(name)
        differs = against is not None and against.get(name) != value
        title = f' title="{escape(KNOBS[name].what)}"' if name in KNOBS else ""
        shown.append(
            f'<code class="knob{" differs" if differs else ""}"{title}>'
            f"{escape(knob_text(name, value))}</code>"
        )
    return "".join(shown) or muted("every knob at its default")


def tile(name: str, text: str, more: Sequence[str], mark: str = "") -> str:
    """Return a tile with one figure, its unit and further lines."""
    value, _, unit = text.partition(" ")
    lines = f'<div class="more lines">{"<br>".join(line for line in more if line)}</div>'
    return (
        f'<div class="figure" data-tile="{name}"><div class="name">{name}</div>'
        f'<div class="value">{escape(value)} <span class="unit">{escape(unit)}</span></div>'
        f"{f'<div class=more>{estimated_mark(mark)}</div>' if mark else ''}{lines}</div>"
    )


#: Keys of study.toml that have another word on the page.
_KEYS = {"baseline": "today"}


def value_html(value: Any, depth: int = 0) -> str:
    """Anything JSON-like as HTML: mappings as definition lists, deep ones folded."""
    if isinstance(value, Mapping):
        if not value:
            return muted("none")
        rows = "".join(
            f"<dt>{escape(_KEYS.get(k, str(k)))}</dt><dd>{value_html(v, depth + 1)}</dd>"
            for k, v in value.items()
        )
        text = f"<dl>{rows}</dl>"
        if depth < 2:
            return text
        return folded(f"{len(value)} entries", text)
    if isinstance(value, str) and value.startswith("{"):  # a study.toml holds the model as JSON
        with contextlib.suppress(ValueError):
            return value_html(json.loads(value), depth)
    if isinstance(value, list | tuple):
        if len(value) > _MOST_ENTRIES:
            return escape(f"{len(value)} values from {value[0]} to {value[-1]}")
        if any(isinstance(v, Mapping | list | tuple) for v in value):
            return "".join(f"<div>{value_html(v, depth + 1)}</div>" for v in value)
        return escape(", ".join(map(str, value))) or muted("none")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return escape(str(value)) if value is not None else muted("not given")
