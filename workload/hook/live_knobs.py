"""Live knobs of the running program: settings between steps, while every rank waits.

The program registers a function for each knob of its own, and perhaps one that reads it. The agent
names values at a boundary; each is set and read back before the next step.
"""

from collections.abc import Callable, Mapping
from typing import Any

from . import state

_registered: dict[str, tuple[Callable[[Any], object], Callable[[], Any] | None]] = {}


def live(
    name: str, set_value: Callable[[Any], object], read: Callable[[], Any] | None = None
) -> None:
    """Register the function that sets a live knob between optimizer steps, on every rank, and its
    reader.

    Outside a probe it is called once, here, with the value that the run was started for.
    """
    _registered[name] = set_value, read
    chosen = state.options.get("live", {})
    if state.link is None and name in chosen:
        set_value(chosen[name])


def forget() -> None:
    """Forget the functions of an earlier program."""
    _registered.clear()


def present() -> dict[str, Any]:
    """Return each registered knob with its present value, None if it cannot be read."""
    return {name: read() if read else None for name, (_, read) in _registered.items()}


def set_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Set knobs; return {"read": the values read back} or {"refused": sentence}."""
    read_back: dict[str, Any] = {}
    for name, value in values.items():
        if name not in _registered:
            return {"refused": f"the script has not registered a live knob {name!r}"}
        set_value, read = _registered[name]
        try:
            set_value(value)
            if read is not None:
                read_back[name] = read()
        except Exception as error:
            message = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
            return {"refused": f"the script's function for {name} refused {value!r}: {message}"}
    return {"read": read_back}
