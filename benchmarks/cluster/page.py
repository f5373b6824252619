"""`doctor_steps`: commands from nothing to the first answer of `tuner doctor`, counted on the page.

`tests/cluster/test_ray_page.py` types them on three hosts.
"""

from __future__ import annotations

import re

from benchmarks.figures import Figure
from benchmarks.source import ROOT


def lines_of_page() -> list[str]:
    """Return the lines of shell by which docs/clusters.md starts a cluster."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    section = page.partition("## Start a Ray cluster")[2]
    return re.findall(r"```text\n(.*?)```", section, re.DOTALL)[0].splitlines()


def figures() -> list[Figure]:
    """Return the number of lines."""
    return [Figure("doctor_steps", len(lines_of_page()), "count")]
