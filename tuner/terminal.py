"""Standard output and standard error of the commands.

What the commands print holds words of others: a script's exception, a table's column, a file's
name. A control character in them could rename the window, clear the screen or hide a line, so the
commands print each as visible text, `\\x1b` for ESC.

A stream that nobody reads changes no exit code: what is printed to it goes nowhere from then on.
"""

from __future__ import annotations

import contextlib
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


class SafeStream:
    """A text stream that writes to another one, and goes nowhere after a failed write.

    A write that fails because the reader is gone is no error.

    Args:
        raw: the other stream.
        may_fail: no failed write is an error.
    """

    def __init__(self, raw: TextIO, *, may_fail: bool = False) -> None:
        self.raw, self.may_fail = raw, may_fail

    def write(self, text: str) -> int:
        """Write text."""
        with self._failing():
            self.raw.write(text)
        return len(text)

    def flush(self) -> None:
        with self._failing():
            self.raw.flush()

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _leave(self.raw)
            if not self.may_fail and not isinstance(error, BrokenPipeError):
                raise OSError(error.errno, error.strerror, OUTPUT) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


class VisibleStream(SafeStream):
    """A stream that writes `visible` text to another one."""

    def write(self, text: str) -> int:
        """Write text with its control characters made visible."""
        super().write(visible(text))
        return len(text)


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream that a `SafeStream` writes to; any other stream itself."""
    return stream.raw if isinstance(stream, SafeStream) else stream


def _leave(stream: TextIO) -> None:
    # What it holds, and what it is given later, goes nowhere. Python would try to write it at its
    # own end, and exit with 120 if that failed.
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor, or a closed one
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _take_free_descriptors() -> None:
    # A file that got the number of a standard stream would get what libraries print to that.
    # Programs that are started find the descriptor closed, as they would without this.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _nowhere() -> TextIO:
    # In place of a stream that the caller has closed, of which Python makes None.
    return open(os.devnull, "w", encoding="utf-8")


@contextmanager
def visible_streams() -> Iterator[None]:
    """Make standard output and standard error print `visible` text, also in a traceback.

    A failure of standard error is no failure of the program, nor one that the program has left
    behind in either stream.
    """
    _take_free_descriptors()
    before = sys.stdout, sys.stderr
    out = VisibleStream(sys.stdout or _nowhere())
    err = VisibleStream(sys.stderr or _nowhere(), may_fail=True)
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield
    except Exception:
        # Python prints the traceback later, when the streams are the old ones again.
        sys.excepthook = lambda *error: traceback.print_exception(*error, file=cast(TextIO, err))
        raise
    finally:
        sys.stdout, sys.stderr = before
        err.flush()
