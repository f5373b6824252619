"""Each way of writing that the architecture forbids is found, and what is allowed is not."""

from pathlib import Path

import pytest

from benchmarks.attributes_set import attributes_set_on_others
from benchmarks.forbidden_ways import kind_tests, private_optuna, trial_reads
from benchmarks.source import Module

JOBS = "class Script: ...\nclass Base: ...\nclass ScriptJob(Base): ...\nclass Run(ScriptJob): ..."
#: Classes of ours that the cases set attributes of.
OWN = """
from dataclasses import dataclass, field
class Executor:
    def __init__(self):
        self.waiting = 0
    def copy(self) -> "Executor": ...
    def took(self, other):
        self.waiting = other.waiting
@dataclass
class Flight:
    result: int
    def __post_init__(self):
        object.__setattr__(self, "result", 1)
"""


def modules(folder: Path, text: str, others: str) -> list[Module]:
    """Return a module of this text, and one of other classes."""
    found = []
    for name, source in (("tuner.case", text), ("tuner.others", others)):
        path = folder / f"{name}.py"
        path.write_text(source)
        found.append(Module(name, path))
    return found


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(x, ScriptJob)",
        "isinstance(x, (int, Script))",
        "isinstance(x, int | Script)",
        "issubclass(type(x), tuner.others.Run)",
        "type(x) is Script",
        "type(x) == Script",
        "type(x) in (Script, int)",
        "x.__class__ is Script",
        'type(x).__name__ == "ScriptJob"',
        "from tuner.others import Script as S\nisinstance(x, S)",
        "KINDS = (Script, int)\nisinstance(x, KINDS)",
        "KIND = Script | int\nisinstance(x, KIND)",
        "match x:\n    case Script(): ...",
        "match x:\n    case others.ScriptJob(words=w): ...",
        "f.register(Script, g)",
        "@f.register\ndef _(x: Script): ...",
        "if x.is_script: ...",
        'hasattr(job, "words")',
        'getattr(request.job, "words", None)',
    ],
)
def test_a_test_for_the_kind_of_a_job_is_found(tmp_path: Path, text: str) -> None:
    assert len(kind_tests(modules(tmp_path, text, JOBS))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(x, str | Path)",
        "job.length is None",
        "Script(words)",
        "getattr(job, name)",
        "def f(x: Script) -> ScriptJob: ...",
        "type(x) is int",
    ],
)
def test_what_asks_no_kind_of_a_job_is_not_counted(tmp_path: Path, text: str) -> None:
    assert kind_tests(modules(tmp_path, text, JOBS)) == []


def test_jobs_under_other_names_are_an_error_and_not_progress(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="name the classes of jobs"):
        kind_tests(modules(tmp_path, "isinstance(x, Command)", "class Command: ..."))


@pytest.mark.parametrize(
    "text",
    [
        'trial.user_attrs["peak"]',
        "study.system_attrs",
        "trial.attrs",
        'getattr(trial, "user_attrs")',
        'attrgetter("user_attrs")(trial)',
        'vars(trial)["system_attrs"]',
        "storage.get_trial_user_attrs(1)",
        "study.trials_dataframe()",
        "trial.intermediate_values[3]",
    ],
)
def test_a_read_of_what_a_trial_holds_is_found(tmp_path: Path, text: str) -> None:
    assert len(trial_reads(modules(tmp_path, text, ""))) == 1


def test_writing_to_a_trial_is_allowed(tmp_path: Path) -> None:
    text = '"""Of user_attrs."""\ntrial.set_user_attr("a", 1)\ncreate_trial(user_attrs={"a": 1})\n'
    assert trial_reads(modules(tmp_path, text, "")) == []


@pytest.mark.parametrize(
    "text",
    [
        "import optuna._hypervolume",
        "from optuna._hypervolume import wfg",
        "from optuna.samplers import _base",
        "import optuna\noptuna.samplers._base",
        "from optuna.trial import Trial\ndef f(study):\n    return study._pruned",
        "import optuna\nclass S(optuna.BaseSampler):\n    def f(self):\n        return self._rng",
        "trial._trial_id",
        "study._storage",
        'getattr(trial, "_trial_id")',
        'import_module("optuna._hypervolume")',
        'storage.set_trial_system_attr(1, "constraints", [])',
    ],
)
def test_a_private_name_of_optuna_is_found(tmp_path: Path, text: str) -> None:
    assert len(private_optuna(modules(tmp_path, text, ""))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import optuna\nclass S:\n    def f(self):\n        self._own = self._own + 1",
        "class S:\n    def f(self):\n        self._storage = 1\n        return self._storage",
        "import optuna\noptuna.create_study().__class__",
        "import numpy\nnumpy._core",
    ],
)
def test_private_names_of_others_are_not_counted(tmp_path: Path, text: str) -> None:
    assert private_optuna(modules(tmp_path, text, "")) == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(executor: Executor):\n    executor.waiting = 1",
        "def f(executor: 'Executor | None'):\n    executor.waiting += 1",
        "def f(executor):\n    executor.waiting = 1",
        "executor = Executor()\nexecutor.waiting = 1",
        "def f(each: Executor):\n    other = each.copy()\n    other.unknown = 1",
        "def f(each: Executor):\n    del each.waiting",
        "def f(each: Executor):\n    a, each.waiting = 1, 2",
        "def f(each: Executor):\n    for each.waiting in (): ...",
        'def f(each: Executor):\n    setattr(each, "waiting", 1)',
        "def f(each, name):\n    setattr(each, name, 1)",
        'def f(each: Flight):\n    object.__setattr__(each, "result", 1)',
        'def f(each: Flight):\n    each.__dict__["result"] = 1',
        "def f(each: Flight):\n    vars(each).update(result=1)",
        "class Loop:\n    def f(self, executor: Executor):\n        executor.waiting = 1",
        "class Loop:\n    each: Executor\n    def f(self):\n        self.each.waiting = 1",
        "class Loop:\n    def __init__(self, each: Executor):\n        self.each = each\n"
        "    def f(self):\n        self.each.waiting = 1",
        "def f(self):\n    self.waiting = 1",
    ],
)
def test_an_attribute_set_on_another_object_is_found(tmp_path: Path, text: str) -> None:
    source = f"from tuner.others import Executor, Flight\n{text}\n"
    assert len(attributes_set_on_others(modules(tmp_path, source, OWN))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "thread = threading.Thread()\nthread.waiting = True",
        "def f(args: argparse.Namespace, name):\n    setattr(args, name, 1)",
        "def f(trainer):\n    trainer.its_own = 1",
        "class A(Executor):\n    def f(self, other: Executor):\n        other.waiting = 1",
        "class A:\n    @classmethod\n    def f(cls):\n        new = cls.__new__(cls)\n"
        "        new.waiting = 1",
        "class A:\n    @classmethod\n    def f(cls):\n        a = cls(1)\n        a.waiting = 1",
        "class A:\n    def f(self):\n        def inner():\n            self.waiting = 1",
        "def f(each: Executor):\n    each.children[0] = 1",
    ],
)
def test_ones_own_and_foreign_objects_are_not_counted(tmp_path: Path, text: str) -> None:
    source = f"import argparse, threading\nfrom tuner.others import Executor\n{text}\n"
    assert attributes_set_on_others(modules(tmp_path, source, OWN)) == []
