"""The table of all kinds of bad input."""

from __future__ import annotations

from tests.fuzz import commands, kinds, readers
from tests.fuzz.kinds import Kind

KINDS: tuple[Kind, ...] = (*kinds.KINDS, *readers.KINDS, *commands.KINDS)
