"""The question before something runs that a file names, and not the user."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tuner.search_spaces.errors import InputError


def require_trust(args: argparse.Namespace, starts: Sequence[str], source: str) -> None:
    """Print what comes from a source; without --trust, continue only after a yes at a terminal.

    Raises:
        InputError: the user says no, or cannot be asked.
    """
    if not starts:
        return
    print(f"tuner: {source} starts or sets this, with your rights:", file=sys.stderr)
    print(*(f"  {line}" for line in starts), sep="\n", file=sys.stderr, flush=True)
    if args.trust:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InputError("nothing was started; add --trust if you trust what is listed")
    print("Start it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InputError("nothing was started")
