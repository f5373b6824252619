"""What torchtitan 0.2 needs to train on a CPU, which it takes for a GPU without a driver.

Its own option `experimental.custom_import` names this module, so torchtitan itself is unmodified.
"""

from __future__ import annotations

import sys
import types

import torch
import torchtitan.tools.utils
from torch.distributed.fsdp import FSDPModule


class _CPU(types.SimpleNamespace):
    """`torch.cpu` with the questions that torchtitan asks `torch.cuda`."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cpu, name)


def _nothing(*args: object) -> None:
    pass


device = _CPU(
    get_device_name=lambda *args: "CPU",
    get_device_properties=lambda *args: types.SimpleNamespace(total_memory=2**34),
    memory_stats=lambda *args: {},
    reset_peak_memory_stats=_nothing,
    empty_cache=_nothing,
    set_device=_nothing,
    current_device=lambda: 0,
)
for name, module in list(sys.modules.items()):
    if name.startswith("torchtitan"):
        for attribute, value in (("device_type", "cpu"), ("device_module", device)):
            if hasattr(module, attribute):
                setattr(module, attribute, value)
_plain = FSDPModule.set_gradient_divide_factor


def _without_premultiplied_sum(module: FSDPModule, factor: float) -> None:
    """Set the factor, and divide apart from the reduction: Gloo has no premultiplied sum."""
    _plain(module, factor)
    module.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = _without_premultiplied_sum  # type: ignore[method-assign]
assert torchtitan.tools.utils.device_type == "cpu"
