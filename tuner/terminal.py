"""Text that is safe at a terminal.

What the commands print holds words of others: a script's exception, a table's column, a file's
name. A control character in them could rename the window, clear the screen or hide a line, so the
commands print each as visible text, `\\x1b` for ESC.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

#: The control characters of ISO/IEC 6429 (C0 and C1) but newline and tab, DEL, separators of lines
#: and characters that reorder text (Unicode's Bidi_Control), and surrogates: the bytes of a file
#: name that is not UTF-8, which a terminal may read as controls and UTF-8 cannot encode.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte under the error handler "surrogateescape"
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def visible(text: str) -> str:
    """Return the text with control and direction characters as `\\xNN`, but newline and tab."""
    return _CONTROLS.sub(_escape, text)


#: What an OSError names that a full disk, or a terminal that is gone, raises at a write.
OUTPUT = "the output"


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, OUTPUT) from error


class VisibleStream:
    """A text stream that writes `visible` text to another one."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        """Write text with its control characters made visible."""
        with _named():
            self.raw.write(visible(text))
        return len(text)

    def flush(self) -> None:
        with _named():
            self.raw.flush()

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream that a `VisibleStream` writes to; any other stream itself."""
    return stream.raw if isinstance(stream, VisibleStream) else stream


def _nowhere() -> TextIO:
    # In place of a stream that the caller has closed, of which Python makes None.
    return open(os.devnull, "w", encoding="utf-8")


@contextmanager
def visible_streams() -> Iterator[None]:
    """Make standard output and standard error print `visible` text, also in a traceback."""
    before = sys.stdout, sys.stderr
    out, err = (cast(TextIO, VisibleStream(stream or _nowhere())) for stream in before)
    sys.stdout, sys.stderr = out, err
    try:
        yield
    except Exception:
        # Python prints the traceback later, when the streams are the old ones again.
        sys.excepthook = lambda *error: traceback.print_exception(*error, file=err)
        raise
    finally:
        sys.stdout, sys.stderr = before
