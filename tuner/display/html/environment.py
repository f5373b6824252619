"""The package's HTML templates: jinja2 escapes every text that a user or a script wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tuner.formatting import knob_text, label, number, ordered_knobs
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knobs import KNOBS


def in_script(text: str) -> Markup:
    """Return JSON that cannot end its script element, whatever strings are in it: <, > and & occur
    only inside JSON strings, where they may be written as escapes."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def whole_figures(text: str) -> str:
    """Return a text whose numbers stay on one line with the unit or word after them."""
    return re.sub(r"(?<=\d) (?=\S)", "\u00a0", text)


def _text_of(name: str) -> Markup:
    return Markup((resources.files("tuner") / "templates" / name).read_text(encoding="utf-8"))


@cache
def environment() -> Environment:
    """Return the templates with the functions that format figures and knobs."""
    made = Environment(
        loader=PackageLoader("tuner"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["in_script"] = in_script
    made.filters["whole_figures"] = whole_figures
    made.filters["json"] = lambda value: in_script(json.dumps(value))
    made.tests["not_flat"] = lambda values: any(
        isinstance(each, Mapping | list | tuple) for each in values
    )
    made.globals.update(
        KNOBS=KNOBS,
        configuration_of=Configuration,
        knob_text=knob_text,
        label=label,
        number=number,
        ordered_knobs=ordered_knobs,
        text_of=_text_of,
    )
    return made


def render(name: str, **values: Any) -> str:
    """Return a template filled with these values."""
    return environment().get_template(name).render(**values)


def macro(name: str, *arguments: Any) -> str:
    """Render a macro of `macros.html` with its arguments."""
    return str(getattr(environment().get_template("macros.html").module, name)(*arguments))
