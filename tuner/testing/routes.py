"""Contract tests of a route: a test class that a plug-in's tests inherit.

    from tuner.testing.routes import RouteContract

    class TestMine(RouteContract):
        def route(self): return MyRoute()
        def job(self, folder): return ScriptJob(...)
        def other(self): return "activation_checkpointing", "full"
        def shown(self, start): return start.env.get("MINE")

The route must be found by the job: as an entry point of `joulefront.routes`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.workload.scripts.command import Start
from tuner.workload.scripts.routes import Route, routes, today_by
from tuner.workload.scripts.script_facts import LAUNCH
from tuner.workload.scripts.script_job import ScriptJob


class RouteContract:
    """Tests that every route passes on a job on which it sets a knob."""

    def route(self) -> Route:
        """Return the route."""
        raise NotImplementedError("define route")

    def job(self, folder: Path) -> ScriptJob:
        """Return a job on which the route sets a knob; its files are in a folder."""
        raise NotImplementedError("define job")

    def other(self) -> tuple[str, Value]:
        """Return the knob that the route sets, and a value that is not today's."""
        raise NotImplementedError("define other")

    def shown(self, start: Start) -> Any:
        """Return where a start shows the value of the knob."""
        raise NotImplementedError("define shown")

    def _changed(self, job: ScriptJob) -> Configuration:
        knob, value = self.other()
        return Configuration(Settings({**job.baseline.launch, knob: value}))

    def test_todays_values_are_legal_and_the_baseline(self, tmp_path: Path) -> None:
        """What it reads of the present command is what the job is compared with."""
        job = self.job(tmp_path)
        for name, value in self.route().today(job).items():
            assert KNOBS[name].check(value) == value
            assert name in today_by(routes(), job)
        for name, value in today_by(routes(), job).items():
            assert job.baseline.get(name) == value

    def test_what_a_route_supports_holds_todays_value(self, tmp_path: Path) -> None:
        """A supported knob has a reason, and today's value among its values."""
        job = self.job(tmp_path)
        for name in LAUNCH:
            support = self.route().support(job, name)
            if support is not None:
                assert support.why
                assert not support.values or job.baseline.get(name) in support.values, name

    def test_a_configuration_is_applied_and_todays_changes_nothing(self, tmp_path: Path) -> None:
        """Two starts of today are equal, and that of another value is not."""
        job = self.job(tmp_path)
        assert job.refused(self._changed(job)) == []
        today, again = (self.shown(job.start(job.baseline, tmp_path / name)) for name in "ab")
        assert today == again
        assert self.shown(job.start(self._changed(job), tmp_path / "c")) != today

    def test_a_job_that_was_sent_to_another_process_starts_the_same(self, tmp_path: Path) -> None:
        """An agent gets the job by pickle."""
        job = self.job(tmp_path)
        start = job.start(self._changed(job), tmp_path / "p")
        sent: ScriptJob = pickle.loads(pickle.dumps(job))
        assert sent.start(self._changed(job), tmp_path / "p") == start
        assert sent.needs_hook == job.needs_hook
