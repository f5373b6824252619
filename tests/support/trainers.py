"""The smallest trainings of transformers' Trainer and of Lightning, for what hooks into them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


class Reporter:
    """Callback of a Trainer that keeps what is logged; with `fails`, the next step raises."""

    def __init__(self) -> None:
        self.reported: list[dict[str, float]] = []
        self.fails = False

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.reported.append(dict(logs))

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.fails:
            raise ZeroDivisionError


def small_trainer(folder: Path, **settings: Any) -> tuple[Any, Reporter]:
    """Return a Trainer of a tiny GPT-2 on cores, and what it reports."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback
    from transformers import TrainingArguments as Arguments

    reporter = type("Kept", (Reporter, TrainerCallback), {})()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 12
    given = Arguments(str(folder), report_to=[], use_cpu=True, save_strategy="no", **settings)
    return Trainer(model, given, train_dataset=data, callbacks=[reporter]), reporter


def small_lightning(
    lightning: Any, at_step: Callable[[int], object] = lambda number: None, **settings: Any
) -> tuple[Any, Callable[[], None]]:
    """Return a Lightning trainer on cores, and the function that fits one linear layer by it."""
    import torch

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, number: int) -> Any:
            at_step(number)
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(accelerator="cpu", **dict.fromkeys(quiet, False), **settings)
    loader = torch.utils.data.DataLoader(torch.randn(8, 4))
    return trainer, lambda: trainer.fit(Module(), loader)
