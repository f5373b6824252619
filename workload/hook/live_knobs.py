"""Live knobs of the running program: what is set between steps, while every rank waits.

The program registers a function for each knob of its own, and perhaps one that reads it. The agent
names values at a boundary; each is set and read back before the next step. The gradient
accumulation is set in the same way (`Steering`), without a function of the program's, in two loops:
that of a DeepSpeed engine whose batches are the program's own, and that of transformers' Trainer,
which asks for the micro-batches of a step before each. What was really taken is counted and
reported: a program that decides by itself is seen to do so.
"""

from collections.abc import Callable, Mapping
from typing import Any

from . import state

ACCUMULATION = "gradient_accumulation"

_registered: dict[str, tuple[Callable[[Any], object], Callable[[], Any] | None]] = {}


def live(
    name: str, set_value: Callable[[Any], object], read: Callable[[], Any] | None = None
) -> None:
    """Register what sets a live knob between optimizer steps, on every rank, and what reads it.

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
        if name == ACCUMULATION:
            state.steering.set(value)
            continue
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


class Steering:
    """Accumulation that the agent wants (0: the program's own), and what the program took."""

    def __init__(self, wanted: int = 0) -> None:
        self.wanted = wanted
        self._engine: Any = None
        self._by_trainer = False
        self._taken = 0

    def engine(self, engine: Any) -> None:
        """Take over the accumulation of a DeepSpeed engine, unless a framework has it."""
        managed = getattr(engine, "managed_gradient_accumulation", lambda: True)
        if not self.wanted or state.seen.get("owner") or not managed():
            return
        self._engine = engine
        self.set(self.wanted)

    def trainer(self, trainer: Any) -> int:
        """Return the micro-batches of the Trainer's next step; 0 leaves them to it."""
        if self.wanted:
            self._by_trainer = True
            trainer.args.gradient_accumulation_steps = self.wanted
        return self.wanted

    def set(self, micro_batches: int) -> None:
        """Let a step take so many micro-batches from here on; call it between steps."""
        self.wanted = micro_batches
        engine = self._engine
        if engine is not None:
            # As `set_train_batch_size` does, which does not know the data-parallel degree where the
            # program brings an mpu that does not tell it (DeepSpeed's own for Ulysses, 0.19.8).
            a_micro_batch = engine.train_batch_size() // engine.gradient_accumulation_steps()
            engine._config.train_batch_size = a_micro_batch * micro_batches
            engine._config.gradient_accumulation_steps = micro_batches
            engine.micro_steps = 0  # the engine steps where this is a multiple

    def engine_took(self, engine: Any, micro_batches: int) -> None:
        """Count micro-batches of the engine."""
        if engine is self._engine:
            self._taken += micro_batches

    def trainer_took(self) -> None:
        """Count a micro-batch of the Trainer."""
        self._taken += self._by_trainer

    def taken(self) -> int:
        """Return the micro-batches since the last call; 0 if the accumulation is not ours."""
        taken, self._taken = self._taken, 0
        return taken
