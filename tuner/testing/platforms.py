"""Contract tests of a platform: a test class that a plug-in's tests inherit.

    from tuner.testing.platforms import PlatformContract

    class TestMine(PlatformContract):
        entry = "mine"

        def without_devices(self, tmp_path, monkeypatch): return Mine({}, sys=tmp_path)
        def with_devices(self, tmp_path, monkeypatch): return Mine({}, sys=tmp_path)

The devices may be stand-ins. The protocol is `tuner.workload.node.platforms.base.Platform`.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.workload.node.clocks.base import AppliedSettings, Governor
from tuner.workload.node.meters.base import TAKEN, Meter
from tuner.workload.node.platforms import SOCKET
from tuner.workload.node.platforms.base import DeviceFacts, Host, Platform

HOST = Host(2**38, 64)


class PlatformContract:
    """Tests that every platform passes.

    Attributes:
        entry: its name, which is the type of its devices.
        cores: True for a platform that every machine has.
    """

    entry = ""
    cores = False

    def without_devices(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
        """Return the platform on a node that has none of its devices."""
        raise NotImplementedError("define without_devices")

    def with_devices(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
        """Return the platform on a node with at least one device, which no process uses."""
        raise NotImplementedError("define with_devices")

    @pytest.fixture
    def empty(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
        """Return the platform without devices."""
        return self.without_devices(tmp_path, monkeypatch)

    @pytest.fixture
    def platform(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
        """Return the platform with devices."""
        return self.with_devices(tmp_path, monkeypatch)

    @pytest.fixture
    def cluster(self, platform: Platform) -> Cluster:
        """Return the node with devices, as a cluster."""
        found = platform.cluster(HOST)
        assert found is not None
        return found

    def test_it_follows_the_protocol(self, platform: Platform) -> None:
        """A subclass, so that what it does not define has the usual answer."""
        assert isinstance(platform, Platform)
        assert not [
            sentence for sentence in SOCKET.plugins.left_out if f"{self.entry!r}" in sentence
        ]
        if self.entry not in ("cuda", "cpu"):
            assert SOCKET.check(type(platform)) == ""

    def test_without_devices_it_answers_and_finds_nothing(self, empty: Platform) -> None:
        """Every platform is asked on every node."""
        assert (empty.busy(), empty.faults(), empty.memory_held([1])) == ((), {}, None)
        assert empty.wait_for_release() < 5.0
        assert empty.facts().devices == ()
        assert empty.capabilities() == ""
        if not self.cores:
            assert empty.cluster(HOST) is None
            assert empty.facts().why_none

    def test_its_cluster_is_of_its_devices(self, platform: Platform, cluster: Cluster) -> None:
        """A study is of this type, by which the platform is found again."""
        assert cluster.device.type == self.entry
        assert cluster.devices_per_node >= 1
        assert cluster.device.max_W > 0
        assert cluster.device.peak_flops > 0
        if not self.cores:
            facts = platform.facts()
            assert isinstance(facts, DeviceFacts)
            assert len(facts.devices) == cluster.devices_per_node
            assert len({each.uuid for each in facts.devices}) == len(facts.devices)

    def test_its_meters_have_names_of_their_own(self, platform: Platform) -> None:
        """Records are told apart by them, and none is a shipped one of another platform."""
        meters = platform.meters(load_cluster("cpu-2"))
        assert meters
        assert all(name and callable(opened) for name, opened in meters.items())
        if self.entry in ("cuda", "cpu"):
            assert set(meters) <= set(TAKEN)

    def test_its_meter_counts(self, platform: Platform, cluster: Cluster) -> None:
        """Energy of a named scope, which never decreases."""
        with closing(platform.open_meter(cluster)) as meter:
            assert isinstance(meter, Meter)
            assert len(meter.info.source) > 10
            first, second = meter.read(), meter.read()
            assert second.energy_J >= first.energy_J
            assert second.time_s >= first.time_s

    def test_its_governor_leaves_things_as_they_were(
        self, platform: Platform, cluster: Cluster
    ) -> None:
        """One that may set nothing says why, and one that may restores."""
        governor = platform.open_governor(cluster)
        assert isinstance(governor, Governor)
        assert governor.can_set == (not governor.why_not)
        assert isinstance(governor.apply(Settings()), AppliedSettings)
        if not governor.can_set:
            with pytest.raises(InputError):
                governor.apply(Settings(clock_MHz=1))
        assert governor.foreign() == ()
        governor.restore()
        governor.close()
        governor.close()
        assert platform.clocks().can_set or platform.clocks().note

    def test_nobody_uses_its_devices(self, platform: Platform) -> None:
        """A study begins only then."""
        assert platform.busy() == ()
        environment = platform.rank_environment({}, 1, 1, "")
        assert all(isinstance(value, str) for value in environment.values())
