"""The core plans, replays and reports without torch, DeepSpeed, Ray or transformers installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.startup import HEAVY
from tests.support.commands import finished

MISSING = ("torch", "deepspeed", "ray", "transformers", "optuna_dashboard", "pandas")
MISSING += ("rich", "shtab", "wandb", "mlflow", "prometheus_client")
SHIPPED = Path(__file__).parent / "data" / "cpu-tiny-gpt"

CORE = """
import sys
class Without:  # what is left out is not to be found, as where it is not installed
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        left_out = name.partition(".")[0] in {missing!r}
        return None if left_out else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from tuner.cli.main import main
code = main(["replay", {table!r}, "--runs-dir", {runs!r}, "--max-probes", "6", "--quiet"])
assert code == 0, code
for command in ("show", "apply"):
    assert main([command, "--runs-dir", {runs!r}]) == {{"apply": 2}}.get(command, 0), command
lists = (["list", what] for what in ("jobs", "clusters", "spaces"))
for words in (*lists, ["doctor", "--brief"], ["show", "--html", "--runs-dir", {runs!r}]):
    assert main(words) == 0, words
for job in ("qwen2.5-7b", "lmm-7b", "olmoe-1b-7b"):
    assert main(["fit", job, "--cluster", "a100-8"]) in (0, 1), job
assert main(["fit", "tiny-qwen2.5-lora", "--cluster", "a100-8"]) == 0
plan = ["plan", "opt-350m", "--cluster", "a100-8", "--runs-dir", {runs!r} + "/plans", "--quiet"]
assert main(plan) == 0
assert main(["fit", {other!r}, "--cluster", "a100-8"]) == 2
"""


@pytest.mark.slow
def test_replay_front_and_report_need_only_the_core(tmp_path: Path) -> None:
    other = tmp_path / "config.json"
    other.write_text('{"model_type": "gemma3_text"}')
    runs = tmp_path / "runs"
    code = CORE.format(table=str(SHIPPED), runs=str(runs), other=str(other), missing=MISSING)
    done = finished([sys.executable, "-c", code], timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "pip install torch transformers" in done.stderr
    assert "Front of" in done.stdout
    assert (next(runs.glob("*/report.html"))).stat().st_size > 100_000


HELP = """
import sys, tuner, tuner.cli.main
assert callable(tuner.optimize)
try:
    tuner.cli.main.main(["--help"])
except SystemExit as ended:
    assert ended.code == 0
print([name for name in {heavy!r} if name in sys.modules])
"""


def test_importing_tuner_and_its_help_import_nothing_heavy() -> None:
    code = HELP.format(heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "optimize" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_session_is_imported_without_scipy_stats() -> None:
    """It takes a second, which the first start of a script would wait for."""
    code = "import sys, tuner.study.session; print('scipy.stats' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
