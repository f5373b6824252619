"""DeepSpeed's configuration files, read as DeepSpeed reads them (`tuner.workload.hook`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import read_bytes
from tuner.workload.hook import parse_config
from tuner.workload.scripts.key_files import shown

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
    settings = _read(path, named)
    _check_types(settings, named)
    return settings


def _read(path: Path, named: str) -> dict[str, Any]:
    try:
        data = read_bytes(path, _MOST_BYTES)
        if len(data) > _MOST_BYTES:
            raise InputError(f"{named} is too large for a DeepSpeed configuration")
        settings = parse_config(data.decode("utf-8-sig"))
    except OSError as error:
        raise InputError(f"cannot read {named}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{named} is not a valid DeepSpeed configuration: {error}") from error
    if not settings:
        raise InputError(f"{named} holds no setting of DeepSpeed")
    return settings


def _check_types(settings: Mapping[str, Any], named: str) -> None:
    """Raise InputError for a value of another type than DeepSpeed takes."""
    for key, (allowed, is_allowed) in _VALUES.items():
        table, _, name = key.rpartition(".")
        holder: Any = settings
        for part in filter(None, table.split(".")):
            holder = holder.get(part) if isinstance(holder, Mapping) else None
        value = holder.get(name) if isinstance(holder, Mapping) else None
        if value is not None and not is_allowed(value):
            raise InputError(f"{key} is {shown(value)} in {named}; it must be {allowed}")


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_count(value: Any) -> bool:
    return value == "auto" or (type(value) is int and value > 0)


_TABLE = ("an object", _is_table)
#: Values that are read here, by key: what is allowed, and its check. What transformers fills in
#: from its own arguments is "auto" (DeepSpeed 0.19's config-json page, transformers' integration).
_VALUES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(_KEYS[:3], ('a whole number of at least 1, or "auto"', _is_count)),
    "zero_optimization": ("an object", lambda value: _is_table(value) or type(value) is bool),
    "zero_optimization.stage": ("0, 1, 2 or 3", lambda value: value in (0, 1, 2, 3)),
    "zero_optimization.offload_optimizer": ('an object, such as {"device": "cpu"}', _is_table),
    "zero_optimization.offload_param": ('an object, such as {"device": "cpu"}', _is_table),
    "optimizer": _TABLE,
    "optimizer.params": _TABLE,
    "scheduler": _TABLE,
    "bf16": _TABLE,
    "fp16": _TABLE,
    "tensor_parallel": _TABLE,
    "sequence_parallel_size": ("a whole number of at least 1", _is_count),
}


def is_deepspeed_file(path: Path) -> bool:
    """Return True if a file holds a DeepSpeed configuration."""
    try:
        return bool({*_read(path, str(path))} & {*_KEYS})
    except InputError:
        return False
