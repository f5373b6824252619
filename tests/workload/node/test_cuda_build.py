"""The fork server and ranks with torch's CUDA build, which this environment's torch may not be.

It is installed once into a cached folder, by the pip of this environment with its settings.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.workload.node import cuda_build_cases as cases
from tests.workload.node.cuda_build_cases import CASES, launch
from tests.workload.node.cuda_build_install import NotInstalled, pinned

LAUNCHES = (pytest.mark.long, pytest.mark.real, pytest.mark.needs("cc"), pytest.mark.timeout(600))


def launches(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that installs the CUDA build and launches with it."""
    for mark in LAUNCHES:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def packages() -> Path:
    try:
        return pinned(limit_s=240.0)
    except NotInstalled as error:
        pytest.skip(str(error))


@launches
@pytest.mark.parametrize(
    "case", [pytest.param(CASES[0], marks=pytest.mark.extra("tuner.workload.program")), *CASES[1:]]
)
def test_ranks_of_the_cuda_build_reach_their_own_cuinit(packages: Path, case: str) -> None:
    """Nothing starts or spoils CUDA before the fork."""
    found = launch(case, packages)
    assert found.bad_forks == []
    assert (found.touches, found.why) == (0, "")
    assert found.reached == len(found.ranks) >= 3


@pytest.mark.real
@pytest.mark.timeout(120)
def test_every_preload_is_asked_for_as_the_fork_server_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate over the preloads ended in a KeyError, and printed nothing."""
    monkeypatch.setattr(cases, "PRELOAD_OPTIONAL", ("json",))
    monkeypatch.setattr(cases, "FRAMEWORKS", ())
    found = cases._preloads(tmp_path)
    assert len(found.ranks) == 3  # one after each import


def test_without_a_network_or_room_it_is_left_out_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": "", "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NotInstalled, match=r"pip cannot install torch===.*No matching"):
        pinned()
    with pytest.raises(NotInstalled, match="no CUDA build of torch is installed in"):
        pinned(limit_s=0.0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=11e9))
    with pytest.raises(NotInstalled, match=r"has 11 GB free, and .* needs 12 GB"):
        pinned()
    assert [path.name for path in (tmp_path / "joulefront" / "cuda-build").iterdir()] == ["lock"]
