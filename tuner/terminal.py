"""Text that is safe at a terminal.

What the commands print holds words of others: a script's exception, a table's column, a file's
name. A control character in them could rename the window, clear the screen or hide a line, so the
commands print each as visible text, `\\x1b` for ESC.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

#: The control characters of ISO/IEC 6429 (C0 and C1) but newline and tab, and surrogates: the bytes
#: of a file name that is not UTF-8, which a terminal may read as controls and UTF-8 cannot encode.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x80-\x9f\ud800-\udfff]")


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte under the error handler "surrogateescape"
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def visible(text: str) -> str:
    """Return the text with each control character but newline and tab as `\\xNN`."""
    return _CONTROLS.sub(_escape, text)


class VisibleStream:
    """A text stream that writes `visible` text to another one."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        """Write text with its control characters made visible."""
        self.raw.write(visible(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write each of the lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream that a `VisibleStream` writes to; any other stream itself."""
    return stream.raw if isinstance(stream, VisibleStream) else stream


@contextmanager
def visible_streams() -> Iterator[None]:
    """Make standard output and standard error print `visible` text, also in a traceback."""
    before = sys.stdout, sys.stderr
    out, err = (cast(TextIO, stream and VisibleStream(stream)) for stream in before)
    sys.stdout, sys.stderr = out, err
    try:
        yield
    except Exception:
        # Python prints the traceback later, when the streams are the old ones again.
        sys.excepthook = lambda *error: traceback.print_exception(*error, file=err)
        raise
    finally:
        sys.stdout, sys.stderr = before
