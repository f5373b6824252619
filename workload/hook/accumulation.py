"""The gradient accumulation of the running program, which the agent changes between steps.

Two loops let it change: that of a DeepSpeed engine whose batches are the program's own, and that of
transformers' Trainer, which asks for the micro-batches of a step before each. What was really taken
is counted and reported: a program that decides by itself is seen to do so.
"""

from typing import Any

from . import state, watching


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
        if not self.wanted or watching.owner() or not managed():
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


def patch_trainer(transformers: Any) -> None:
    """Let transformers' Trainer ask for the micro-batches of each step."""
    owner = transformers.Trainer
    if not state.steering.wanted or not hasattr(owner, "get_batch_samples"):
        return
    plain_batches, plain_step = owner.get_batch_samples, owner.training_step

    def get_batch_samples(self: Any, batches: Any, count: int, *more: Any, **named: Any) -> Any:
        return plain_batches(self, batches, state.steering.trainer(self) or count, *more, **named)

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain_step(self, *args, **kwargs)
        state.steering.trainer_took()
        return result

    owner.get_batch_samples, owner.training_step = get_batch_samples, training_step
