"""Commands of benchmarks, as short as they can be, with the figures that are asked of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.figures import ROOT
from tests.support.commands import finished

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("size", "test_lines benchmark_lines core_lines extra_lines production_files"),
        ("held", "faults_listed without_a_test"),
        (
            "verdicts --quick --trials 1",
            "false_recommendations_flat false_recommendations_machines recommended_73_percent "
            "recommended_10_percent recommended_5_percent fresh_launches_30_percent "
            "saving_coverage",
        ),
        (
            "coverage --quick --jobs 1",
            "coverage_energy coverage_time coverage_front_probability saving_bias exact_error_mean "
            "false_confirmations_whole_searches",
        ),
        ("driver --searches 1", "driver_cpu_s_8_probes"),
        ("startup --runs 1", "import_tuner_s tuner_help_s heavy_modules"),
        ("planning --no-large", "plan_100k_s plan_100k_processor_s"),
        pytest.param(
            "launch --rounds 1",
            "first_probe_s later_probes_median_s forked_over_fresh",
            marks=pytest.mark.real,
        ),
        pytest.param(
            "metering --pairs 2 --block-s 0.3",
            "overhead overhead_low overhead_high",
            marks=pytest.mark.real,
        ),
    ],
)
def test_a_command_prints_the_figures_of_its_name(command: str, names: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = [sys.executable, "-m", f"benchmarks.{command.partition(' ')[0]}", "--json", str(file)]
    done = finished([*words, *command.split()[1:]], cwd=ROOT, timeout=500)
    assert done.returncode == 0, done.stderr
    figures = {each["name"]: each["value"] for each in json.loads(file.read_text())}
    assert {*names.split()} <= {*figures}
    last = done.stdout.splitlines()[-1].split()
    assert last[0] == "figure"
    assert float(last[2]) == pytest.approx(figures[last[1]], rel=1e-4, nan_ok=True)
