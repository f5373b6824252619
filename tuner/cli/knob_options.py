"""Options that declare knobs, of the commands that take a script."""

from __future__ import annotations

from typing import Any

__all__ = ["add_knobs"]


def add_knobs(parser: Any) -> None:
    """Add the options that declare knobs."""
    parser.add_argument(
        "--knob",
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="knob of your own: 'compile=false,true' for {compile} in the command, "
        "'env:NCCL_ALGO=Ring,Tree', 'FILE.yaml:KEY=VALUE,...', 'deepspeed:KEY:int=5e7,5e8', "
        "'live:NAME=VALUE,...'; repeatable",
    )
    parser.add_argument(
        "--knobs",
        action="append",
        default=[],
        metavar="PACK|FILE",
        help="knobs declared together: a pack (tuner knobs), framework for those of the recognised "
        "framework, or a TOML file; repeatable",
    )
