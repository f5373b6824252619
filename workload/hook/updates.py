"""Updates of parameters that a program writes itself, which no optimizer shows.

Between two backward passes gradients add up, and parameters stay as they are, unless the program
takes a step. Where gradients are cleared and parameters have changed, and no torch optimizer has
stepped, the program updates them by hand.
"""

import contextlib
from typing import Any

from . import state

#: Updates by hand until that is certain, in a program that has made no optimizer, and in one that
#: has: meta-learning updates copies by hand a few times before each step.
WITHOUT_OPTIMIZER, BESIDE_OPTIMIZER = 3, 100
#: Parameters and numbers of each that are looked at.
_PARAMETERS, _NUMBERS = 4, 16


class HandWrittenUpdates:
    """Watcher of the parameters of the outermost modules until the first optimizer step."""

    def __init__(self, torch: Any, around: Any) -> None:
        self._updates = 0
        self._made = False
        self._parameters: list[Any] = []
        self._before: list[tuple[bool, list[float]]] = []
        owner = getattr(getattr(torch, "optim", None), "Optimizer", None)
        if owner is not None:

            @around(owner, "__init__")
            def init(plain: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
                self._made = True
                plain(optimizer, *args, **kwargs)

    def check(self, passes: int) -> None:
        """Compare the parameters with those at the last backward pass; NotAsRequested if it is
        certain.

        Args:
            passes: backward passes so far.
        """
        now: list[tuple[bool, list[float]]] = []
        with contextlib.suppress(Exception):  # parameters of a kind that cannot be read
            if self._parameters or self._find():
                now = [_state(each) for each in self._parameters]
        changed = any(
            before[0] is False and own[0] is False and before[1] != own[1]
            for before, own in zip(self._before, now, strict=False)
        )
        self._before, self._updates = now, self._updates + changed
        limit = BESIDE_OPTIMIZER if self._made else WITHOUT_OPTIMIZER
        if self._updates >= limit:
            raise state.NotAsRequested(
                f"the script ran {passes} backward passes and no optimizer.step(): it updates its "
                "parameters itself. Call joulefront_hook.step() after each update "
                "(docs/your-script.md), or start it with an optimizer"
            )

    def _find(self) -> bool:
        watched = state.seen.get("watched")
        for module in watched.modules() if watched is not None else ():
            own = filter(_readable, module.parameters())
            self._parameters += [each for each, _ in zip(own, range(_PARAMETERS), strict=False)]
        return bool(self._parameters)


def _readable(parameter: Any) -> bool:
    # A sharded parameter would meet the other ranks.
    return parameter.requires_grad and parameter.numel() and not hasattr(parameter, "placements")


def _state(parameter: Any) -> tuple[bool, list[float]]:
    gradient = parameter.grad
    has_gradient = gradient is not None and bool(gradient.any())
    return has_gradient, parameter.detach().flatten()[:_NUMBERS].tolist()
