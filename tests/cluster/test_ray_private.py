"""What is used of Ray that is not public: in one module, and no longer than it is needed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from tuner.cluster.ray_private import TOKENS_BY_DEFAULT

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tuner/cluster/ray_private.py"
#: Private names of Ray, however they are imported.
PRIVATE = re.compile(
    r"\bray\._(?!_)|\bfrom ray\b.* import _|_internal_kv|print_to_stdstream|ray_constants"
)


def test_the_patches_of_rays_access_control_are_still_needed() -> None:
    """Delete on_loopback, reload_authentication, has_tokens and TOKENS_BY_DEFAULT when not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (ray,) = map(Requirement, project["optional-dependencies"]["ray"])
    (least,) = [Version(each.version) for each in ray.specifier if each.operator == ">="]
    assert least < Version(".".join(map(str, TOKENS_BY_DEFAULT)))


def test_no_other_module_touches_what_is_private() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tuner").rglob("*.py")
        if PRIVATE.search(path.read_text())
    }
    assert found == {MODULE}
