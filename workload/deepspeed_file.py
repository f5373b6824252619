"""DeepSpeed's configuration files, read as DeepSpeed reads them (`tuner.workload.hook`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.workload.hook import parse_config

#: An object with one of these is taken for a DeepSpeed configuration.
_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization",
)
#: No configuration of a training is larger; a larger file is data, and is not read.
_MOST_BYTES = 4 * 2**20


def read_deepspeed(path: Path, *, option: str = "") -> dict[str, Any]:
    """Return the settings in a DeepSpeed configuration file; InputError if it holds none.

    Args:
        option: the option that names the file, for messages.
    """
    named = f"{path} of {option}" if option else str(path)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{named} is too large for a DeepSpeed configuration")
        settings = parse_config(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"cannot read {named}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{named} is not a valid DeepSpeed configuration: {error}") from error
    if not settings:
        raise InputError(f"{named} holds no setting of DeepSpeed")
    return settings


def is_deepspeed_file(path: Path) -> bool:
    """Return True if a file holds a DeepSpeed configuration."""
    try:
        return bool({*read_deepspeed(path)} & {*_KEYS})
    except InputError:
        return False
