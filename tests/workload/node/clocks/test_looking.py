"""Looking at a GPU writes nothing to it, also as root."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.twin.front import small_job
from tests.twin import TwinGpu, TwinNode
from tuner.cli.main import main
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.workload.node.clocks.clock_backends import has_right
from tuner.workload.node.facts import inspect_node
from tuner.workload.node.platforms import detect_cluster, platform_of
from tuner.workload.node.runner import LocalRunner

Make = Callable[..., TwinNode]


@pytest.fixture
def node(twin_node: Make) -> TwinNode:
    return twin_node(TwinGpu(), TwinGpu(), virtual_time=False)


@pytest.mark.needs("cc")
class TestOnTwin:
    @pytest.mark.extra("tuner.workload.program.built_in_job", "tuner.doctor.dry_run")
    def test_looking_as_root_is_no_writing(self, node: TwinNode, tmp_path: Path) -> None:
        cluster = detect_cluster()
        assert cluster.clock_control
        facts = inspect_node()
        assert facts.clock_control
        assert facts.why_clocks_fixed == ""
        assert platform_of(cluster).why_fixed(cluster) == ""
        with closing(LocalRunner(small_job(), cluster, run_dir=tmp_path / "run")):
            pass
        assert node.log == []

    @pytest.mark.parametrize(
        "words",
        [
            pytest.param(["doctor"], marks=pytest.mark.slow),
            ["optimize", "--no-clocks", "--dry-run"],
        ],
    )
    def test_commands_that_look_set_nothing(
        self, node: TwinNode, tmp_path: Path, words: list[str]
    ) -> None:
        main([*words, *(["--runs-dir", str(tmp_path)] if words[0] == "optimize" else [])])
        assert node.log == []

    def test_a_cluster_without_clock_control_has_no_setter(self, node: TwinNode) -> None:
        """--no-clocks and clock_control = false; clocks are still read."""
        cluster = replace(detect_cluster(), clock_control=False)
        with closing(platform_of(cluster).open_governor(cluster)) as governor:
            assert not governor.can_set
            assert "--no-clocks" in governor.why_not
            assert governor.delivered()["clock_MHz"] > 0
            governor.apply(Settings())
            with pytest.raises(InputError, match="left alone"):
                governor.apply(Settings(clock_MHz=900))
        assert node.log == []


@pytest.mark.parametrize(
    ("effective", "uid_map", "has"),
    [
        ("000001ffffffffff", "0 0 4294967295", True),
        ("0000000000200000", "         0          0 4294967295", True),
        ("00000000a80425fb", "0 0 4294967295", False),  # Docker's default set
        ("000001ffffffffff", "0 1000 1", False),  # a rootless container's root
        ("", "0 0 4294967295", False),
        ("000001ffffffffff", "", False),
    ],
)
def test_the_right_is_that_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effective: str, uid_map: str, has: bool
) -> None:
    """CapEff in /proc/self/status, in the first user namespace."""
    monkeypatch.delenv("JOULEFRONT_TWIN", raising=False)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text(f"Name:\ttuner\nCapEff:\t{effective}\nSeccomp:\t0\n")
    (tmp_path / "self" / "uid_map").write_text(f"{uid_map}\n")
    assert has_right(tmp_path) is has
    assert not has_right(tmp_path / "none")
