"""A package `torch` with what the hook's light mode watches: optimizers, loaders, process groups.

It imports in a millisecond, so that tests of commands train without torch.
"""

from __future__ import annotations

from pathlib import Path

OPTIMIZER = """
_hooks = []

def register_optimizer_step_post_hook(hook):
    _hooks.append(hook)

class Optimizer:
    def step(self):
        for hook in _hooks:
            hook(self, (), {})
"""
LOADER = """
class _BaseDataLoaderIter:
    def __init__(self, sizes):
        self._sizes = iter(sizes)
        self._reset(self)

    def _reset(self, loader, first_iter=False):
        pass

    def _next_index(self):
        return list(range(next(self._sizes)))

    def __iter__(self):
        return self

    def __next__(self):
        return self._next_index()
"""
TORCH = """
import os
from types import SimpleNamespace

grad = True
def is_grad_enabled():
    return grad

distributed = SimpleNamespace(
    is_available=lambda: True,
    is_initialized=lambda: "RANK" in os.environ,
    get_rank=lambda: int(os.environ["RANK"]),
    get_world_size=lambda: int(os.environ["WORLD_SIZE"]),
)
from torch.optim.optimizer import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter
"""


def write_fake_torch(folder: Path) -> None:
    """Write the package into a folder."""
    files = {
        "torch/__init__.py": TORCH,
        "torch/optim/__init__.py": "",
        "torch/optim/optimizer.py": OPTIMIZER,
        "torch/utils/__init__.py": "",
        "torch/utils/data/__init__.py": "",
        "torch/utils/data/dataloader.py": LOADER,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
