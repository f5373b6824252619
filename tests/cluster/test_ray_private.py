"""What is used of Ray that is not public: in one module, and no longer than it is needed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tuner.cluster.ray_private import TOKENS_BY_DEFAULT

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tuner/cluster/ray_private.py"
#: Private names of Ray, however they are imported.
PRIVATE = re.compile(
    r"\bray\._(?!_)|\bfrom ray\b.* import _|_internal_kv|print_to_stdstream|ray_constants"
)


def needless(requirement: str) -> str:
    """Return the sentence on what goes with the least Ray that a requirement allows, or ""."""
    bounds = [each for each in Requirement(requirement).specifier if each.operator in (">=", "==")]
    (least,) = [tuple(map(int, bound.version.split(".")[:2])) for bound in bounds]
    if least < TOKENS_BY_DEFAULT:
        return ""
    first = ".".join(map(str, TOKENS_BY_DEFAULT))
    return (
        f"{requirement!r} excludes every Ray before {first}, which is private by itself: delete "
        f"on_loopback, reload_authentication, has_tokens and TOKENS_BY_DEFAULT of {MODULE}"
    )


def required() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (found,) = project["optional-dependencies"]["ray"]
    return str(found)


def test_the_patches_of_rays_access_control_are_still_needed() -> None:
    sentence = needless(required())
    assert not sentence, sentence


@pytest.mark.parametrize(
    ("requirement", "goes"),
    [
        ("ray[default]>=2.52", False),
        ("ray[default]>=2.60.1,<3", False),
        ("ray[default]>=2.61", True),
        ("ray[default]>=2.61.0", True),
        ("ray[default]<4,>=3.0", True),
        ("ray[default]>=2.100", True),  # not before 2.61, as text would be
    ],
)
def test_that_is_noticed_when_older_releases_are_given_up(requirement: str, goes: bool) -> None:
    assert bool(needless(requirement)) is goes


def test_no_other_module_touches_what_is_private() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tuner").rglob("*.py")
        if PRIVATE.search(path.read_text())
    }
    assert found == {MODULE}
