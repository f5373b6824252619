"""Contract tests of a kind of executor: a test class that a plug-in's tests inherit.

    from tuner.testing.executors import ExecutorContract

    class TestMine(ExecutorContract):
        def kind(self): return MyKind()
        def opening(self, run_dir): return Opening(load_job("tiny-gpt"), ..., run_dir, print)
        def request(self): return ProbeRequest("p0000", ...)

The probes may be of a stand-in that takes no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tuner.executors.base import Executor, ExecutorKind, Opening
from tuner.executors.choose import SOCKET
from tuner.workload.records.probe import ProbeRequest


class ExecutorContract:
    """Tests that every kind of executor passes."""

    def kind(self) -> ExecutorKind:
        """Return the kind."""
        raise NotImplementedError("define kind")

    def opening(self, run_dir: Path) -> Opening:
        """Return what an executor is opened for."""
        raise NotImplementedError("define opening")

    def request(self) -> ProbeRequest:
        """Return a probe of the job that can run."""
        raise NotImplementedError("define request")

    @pytest.fixture
    def executor(self, tmp_path: Path) -> Iterator[Executor]:
        """Return an open executor."""
        made = self.kind().open(self.opening(tmp_path))
        yield made
        made.close()

    def test_it_follows_the_protocol(self, tmp_path: Path) -> None:
        """Its version, and answers about a cluster that need no executor."""
        opening = self.opening(tmp_path)
        assert SOCKET.check(self.kind()) == ""
        assert self.kind().is_default(opening.cluster, None) in (True, False)
        phrase = self.kind().phrase(opening.cluster, None)
        assert phrase
        assert not phrase.endswith(".")

    def test_it_is_idle_at_first(self, executor: Executor) -> None:
        """Waiting for nothing returns at once."""
        assert isinstance(executor, Executor)
        assert executor.capacity >= 1
        assert executor.in_flight == 0
        assert executor.wait(0.0) is None
        assert executor.meter.name

    def test_a_probe_comes_back_as_a_record(self, executor: Executor) -> None:
        """Once, and the clock does not go back."""
        request, began_s = self.request(), executor.now_s()
        executor.submit(request)
        assert executor.in_flight == 1
        record = executor.wait()
        assert record is not None
        assert record.request.probe_id == request.probe_id
        assert record.ok, record.failure
        assert executor.in_flight == 0
        assert executor.wait(0.0) is None
        assert executor.now_s() >= began_s

    def test_closing_ends_a_probe_in_flight_and_may_be_done_twice(self, executor: Executor) -> None:
        """The end of a search that is interrupted, and of one that is not."""
        executor.submit(self.request())
        executor.close()
        executor.close()
