"""Public names: what `import tuner` brings, and the keywords of `optimize` and `replay`."""

import inspect
import sys

import pytest

import tuner
from tuner.testing.commands import finished
from tuner.testing.studies import write_table


def test_every_public_name_is_there():
    for name in tuner.__all__:
        assert getattr(tuner, name).__name__ == name
    assert set(tuner.__all__) <= set(dir(tuner))
    with pytest.raises(AttributeError, match="no attribute 'frobnicate'"):
        tuner.frobnicate  # noqa: B018


def test_importing_it_imports_only_what_is_used():
    code = (
        "import sys, tuner; before = {n for n in sys.modules if n.startswith('tuner')};"
        "tuner.Constraints; tuner.optimize;"
        "assert before == {'tuner'}, before;"
        "assert not {'torch', 'numpy', 'optuna', 'ray'} & set(sys.modules)"
    )
    ended = finished([sys.executable, "-c", code])
    assert ended.returncode == 0, ended.stderr


def test_limits_may_be_given_as_keywords_or_in_the_object_and_not_against_each_other(tmp_path):
    table = write_table(tmp_path / "table")
    options = {"runs_dir": tmp_path / "runs", "report": False}
    search = tuner.SearchSettings(max_probes=4)
    plain = tuner.replay(table, budget_kJ=5.0, search=search, **options)
    limits = tuner.Constraints(budget_kJ=5.0, max_gpus=1)
    both = tuner.replay(table, budget_kJ=5.0, constraints=limits, search=search, **options)
    assert plain.constraints == {"budget_kJ": 5.0, "max_probes": 4}
    assert both.constraints == {"budget_kJ": 5.0, "max_gpus": 1.0, "max_probes": 4}
    with pytest.raises(tuner.InputError, match=r"budget_kJ is 6.0 and constraints.budget_kJ is 5"):
        tuner.replay(table, budget_kJ=6.0, constraints=limits, **options)


def test_both_functions_take_the_same_headline_keywords():
    optimize, replay = (inspect.signature(f).parameters for f in (tuner.optimize, tuner.replay))
    shared = ("budget_kJ", "deadline_s", "power_cap_W", "constraints", "search")
    for name in shared:
        assert optimize[name].default is replay[name].default is None
