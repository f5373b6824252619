"""What a failed start of the ranks is blamed on."""

from __future__ import annotations

import pytest

from tuner.search_spaces.errors import InputError
from tuner.workload.clocks.base import GovernorError
from tuner.workload.meters import MeterError
from tuner.workload.node.probe_checks import failure_of
from tuner.workload.node.rank_group import NoAnswer, ServerError
from tuner.workload.node.rank_server import RankServer


@pytest.mark.parametrize(
    ("error", "kind", "launch"),
    [
        (NoAnswer("the fork server did not answer 'prepare' in 900 s"), "node", False),
        (ServerError("No module named 'x'", "Traceback", kind="ImportError"), "crash", True),
        (InputError("the job needs two GPUs"), "refused", True),
        (MeterError("GPU 0 is lost"), "node", False),
        (GovernorError("the GPUs did not take 900 MHz"), "node", False),
        (OSError(28, "No space left on device"), "node", False),
    ],
)
def test_a_build_that_takes_too_long_is_no_fault_of_the_launch(
    error: Exception, kind: str, launch: bool
) -> None:
    """Compiling CPU Adam took more than 900 s on a loaded machine, and the launch was blamed."""
    failure = failure_of(error, lambda: "the last lines")  # type: ignore[arg-type]
    assert failure.kind == kind
    assert (failure.type.blames == "launch") == launch
    assert str(error) in failure.message


def test_a_fork_server_that_does_not_answer_is_told_apart() -> None:
    server = RankServer(needs=("json",))
    try:
        server.start()
        with pytest.raises(NoAnswer, match="did not answer 'prepare' in 0 s"):
            server._ask({"op": "prepare", "libraries": []}, timeout_s=0.0)
    finally:
        server.close()
