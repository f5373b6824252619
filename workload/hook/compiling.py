"""Phase marks of torch.compile, wherever the program uses it.

A compilation runs inside the step that first needs it. It is marked as the phase `compilation`, so
that the agent keeps it out of windows; the phase that it interrupts is marked again at its end.
"""

from typing import Any

from . import state

#: The phase, and what follows a compilation in a program that marks nothing: time of no phase.
COMPILATION, BETWEEN = "compilation", "boundary"


def mark_compilations(_: str, module: Any) -> None:
    """Mark compilations, given `torch._dynamo.callback`; releases of torch without it do not."""
    handler = getattr(module, "callback_handler", None)
    if handler is None or not hasattr(handler, "register_start_callback"):
        return
    interrupted = [BETWEEN]

    def begins(_: Any) -> None:
        interrupted[0] = state.seen.get("phase", BETWEEN)
        state.mark(COMPILATION)

    def ends(_: Any) -> None:
        state.mark(interrupted[0])

    handler.register_start_callback(begins)
    handler.register_end_callback(ends)
