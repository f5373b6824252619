"""The walk of a request: what counts as entered, as before the first probe, and as forwarding."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.walk import (
    PROBE,
    Entered,
    Recorder,
    Walk,
    figures_of_walk,
    walk_of_a_request,
)

SOURCE = """
import functools

class Job:
    size = 3

    @functools.cached_property
    def name(self):
        return self.size

    def sizes(self):
        yield from (each for each in range(self.size))

def unused():
    return 1

def begin():
    job = Job()
    return [job.name, *job.sizes(), *map(lambda each: each, ()), *(x for x in ()), job.name]
"""


def loaded(path: Path) -> ModuleType:
    """Import a file under a name of its own."""
    spec = importlib.util.spec_from_file_location("walked", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorded(root: Path, act: Callable[[], object]) -> Walk:
    """Record an action in the files of `root/code`; put back the profiler of this process."""
    before = sys.getprofile()
    recorder = Recorder(root, folders=("code",))
    recorder.start()
    try:
        act()
    finally:
        walk = recorder.stop()
        sys.setprofile(before)
    return walk


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a module into a folder that a package links to, and return its path by the link."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "job.py").write_text(SOURCE)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "code").symlink_to("../code")
    return tmp_path / "package" / "code" / "job.py"


def test_functions_and_bodies_of_classes_count_once_in_their_order(
    file: Path, tmp_path: Path
) -> None:
    walk = recorded(tmp_path, lambda: loaded(file).begin())
    assert [(each.name, each.is_function) for each in walk.entered] == [
        ("Job", False),
        ("begin", True),
        ("Job.name", True),
        ("Job.sizes", True),
    ]
    assert walk.files == ["code/job.py"]
    assert [each.line for each in walk.functions] == [17, 7, 11]
    assert [each.name for each in walk.forwarding()] == ["Job.name"]


def test_a_walk_ends_before_a_function_and_says_if_it_never_came() -> None:
    entered = [
        Entered("a.py", "A", 1, False, 1),
        Entered("b.py", "f", 1, True, 5),
        Entered("a.py", "A.g", 3, True, 1),
    ]
    before = Walk(entered).before("a.py", "A.g")
    assert (len(before.functions), before.files) == (1, ["a.py", "b.py"])
    with pytest.raises(ValueError, match=r"the request never entered A\.h of a\.py"):
        Walk(entered).before("a.py", "A.h")


@pytest.mark.long
@pytest.mark.real
def test_a_real_request_meets_its_first_probe_after_a_part_of_its_functions() -> None:
    walk = walk_of_a_request(
        ("--executor", "inline", "--max-probes", "1", "--search-time", "20s", "--no-verify", "-q")
    )
    found = figures_of_walk(walk)
    assert 50 < found["functions_before_first_probe"] < found["functions_of_a_request"] / 2
    assert 30 < found["files_before_first_probe"] < found["files_of_a_request"]
    assert 0 < found["forwarding_functions"] < found["functions_of_a_request"] / 5
    assert "main" in {each.name for each in walk.before(*PROBE).functions}
