"""Contract tests of a governor: a test class that a plug-in's tests inherit.

    from tuner.testing.clocks import GovernorContract

    class TestMine(GovernorContract):
        def open_governor(self): return NvmlGovernor(environ={"MY_DAEMON": "..."})
        def state(self): return what stands on the devices, as anything that can be compared

A way to set clocks (`joulefront.clocks`) is tested through the governor that uses it; the devices
may be stand-ins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.workload.node.clocks.base import Governor


class GovernorContract:
    """Tests that every governor passes which may set something."""

    def open_governor(self) -> Governor:
        """Return a new governor of at least one device."""
        raise NotImplementedError("define open_governor")

    def state(self) -> Any:
        """Return the settings of the devices."""
        raise NotImplementedError("define state")

    @pytest.fixture
    def governor(self) -> Iterator[Governor]:
        """Return the governor."""
        made = self.open_governor()
        yield made
        made.close()

    @pytest.fixture
    def live(self, governor: Governor) -> Settings:
        """Return a setting that the devices take, and that they do not have already."""
        clocks, (low_W, high_W) = governor.supported_clocks_MHz, governor.limit_range_W
        if clocks:
            return Settings(clock_MHz=clocks[len(clocks) // 2])
        return Settings(power_limit_W=(low_W + high_W) / 2)

    def test_it_may_set_something_and_tells_what(self, governor: Governor) -> None:
        """Where it may not, a platform has a `FixedGovernor` with the reason."""
        assert isinstance(governor, Governor)
        assert governor.can_set
        assert governor.why_not == ""
        clocks = governor.supported_clocks_MHz
        assert list(clocks) == sorted(set(clocks))
        assert clocks or governor.limit_range_W[0] < governor.limit_range_W[1]

    def test_looking_changes_nothing(self, governor: Governor) -> None:
        """A study that never sets a clock leaves no trace."""
        before = self.state()
        governor.delivered()
        assert governor.foreign() == ()
        governor.restore()
        assert self.state() == before

    def test_it_sets_and_restores(self, governor: Governor, live: Settings) -> None:
        """By `restore`, and by a setting without the knob."""
        before = self.state()
        assert governor.apply(live).settings == live
        assert self.state() != before
        assert governor.foreign() == ()  # that was its own
        governor.restore()
        assert self.state() == before
        governor.apply(live)
        governor.apply(Settings())
        assert self.state() == before

    def test_closing_restores_and_may_be_done_twice(
        self, governor: Governor, live: Settings
    ) -> None:
        """However a search ends."""
        before = self.state()
        governor.apply(live)
        governor.close()
        governor.close()
        assert self.state() == before

    @pytest.mark.parametrize(
        "bad", [{"clock_MHz": 1}, {"clock_MHz": "fast"}, {"power_limit_W": 1e9}, {"fan": 3}]
    )
    def test_what_cannot_be_set_is_refused_before_anything_is(
        self, governor: Governor, bad: dict[str, Any]
    ) -> None:
        """As an `InputError`: the devices are as they should be."""
        before = self.state()
        with pytest.raises(InputError):
            governor.apply(Settings(bad))
        assert self.state() == before
