"""Styles of a terminal in the words of programs: bold text of an error, a coloured traceback."""

from __future__ import annotations

import re

#: Control sequences of ECMA-48: CSI, such as a colour; strings with their end, such as a hyperlink
#: (OSC 8); and short ones, such as a character set. An end that is missing hides no text.
_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\n\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
)


def without_styles(text: str) -> str:
    """Return the text that a terminal shows, without the sequences that style it."""
    return _SEQUENCES.sub("", text)
