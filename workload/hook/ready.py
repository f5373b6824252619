"""The moment at which a rank has done its own share of a step and waits for the others' gradients.

The backward pass reaches the first parameter last. A hook on its gradient runs before the gradients
are averaged over the ranks, so the last rank to get there is the one for which all others wait.
"""

import os
from collections.abc import Iterable
from typing import Any

from . import state


def watch(parameters: Iterable[Any]) -> None:
    """Tell the agent when the first parameter's gradient is complete; not in a pipeline."""
    link = state.link
    if link is None or "ready" in state.seen or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return
    if state.seen.get("pipeline"):
        return
    first = next((p for p in parameters if p.requires_grad and p.is_leaf), None)
    if first is not None and hasattr(first, "register_post_accumulate_grad_hook"):
        state.seen["ready"] = True
        first.register_post_accumulate_grad_hook(lambda parameter: link.ready())
