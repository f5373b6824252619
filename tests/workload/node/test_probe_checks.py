"""What a failed start of the ranks is blamed on."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.waiting import wait_until
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.workload.node.clocks.base import GovernorError
from tuner.workload.node.meters import MeterError
from tuner.workload.node.probe_run import failure_of, prepare_ops
from tuner.workload.node.rank_group import NoReply, ServerError
from tuner.workload.node.rank_server import RankServer
from tuner.workload.records.probe import ProbeRequest


@pytest.mark.parametrize(
    ("error", "kind", "launch"),
    [
        (NoReply("the fork server did not answer 'prepare' in 900 s"), "node", False),
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
    failure = failure_of(error, lambda: "the last lines")
    assert failure.kind == kind
    assert (failure.type.blames == "launch") == launch
    assert str(error) in failure.message


class Node:
    """What `prepare_ops` asks of a node, with an op that is built once or that cannot be built."""

    def __init__(self, error: Exception | None = None) -> None:
        self.job, self.server, self.error = load_job("tiny-gpt"), self, error
        self.loaded: set[str] = set()

    def missing_ops(self, ops: Sequence[str]) -> list[str]:
        return [op for op in ops if op not in self.loaded]

    def prepare(self, ops: Sequence[str]) -> None:
        time.sleep(0.02)
        if self.error is not None and ops:
            raise self.error
        self.loaded |= set(ops)


OFFLOAD = ProbeRequest("p", Settings(zero_stage=2, optimizer_offload="cpu", data_parallel=2))


def test_a_build_is_a_phase_and_its_seconds_are_noted_once() -> None:
    node, phases = Node(), list[str]()
    first: dict[str, Any] = {}
    second: dict[str, Any] = {}
    prepare_ops(node, OFFLOAD, first, phases.append)
    prepare_ops(node, OFFLOAD, second, phases.append)
    assert phases == ["building DeepSpeed's CPUAdam, once a machine"]
    assert first["built_s"] > 0
    assert second == {}


def test_a_probe_without_ops_waits_for_no_build() -> None:
    environment: dict[str, Any] = {}
    plain = ProbeRequest("p", Settings(data_parallel=2))
    prepare_ops(Node(), plain, environment, pytest.fail)
    assert environment == {}


def test_the_time_of_a_failed_build_is_noted_too() -> None:
    environment: dict[str, Any] = {}
    node = Node(NoReply("the fork server did not answer 'prepare' in 900 s"))
    with pytest.raises(NoReply):
        prepare_ops(node, OFFLOAD, environment, lambda phase: None)
    assert environment["built_s"] > 0


def test_a_fork_server_that_does_not_answer_is_told_apart() -> None:
    server = RankServer(needs=("json",))
    server._optional = ()
    try:
        server.start()
        with pytest.raises(NoReply, match="did not answer 'kill' in 0 s"):
            server._request_reply({"op": "kill"}, timeout_s=0.0)
        # Its late reply is not taken for that of the next request.
        wait_until(lambda: select.select([server.fileno()], [], [], 0)[0])
        assert server.bind("cores:", 0, []) == []
    finally:
        server.close()
