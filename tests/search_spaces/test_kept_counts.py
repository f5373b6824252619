"""Counts of models that a run keeps, for a machine that cannot count them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuner.problem.run_folder import STUDY_SCHEMA, RunFolder
from tuner.search_spaces import library_count
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import LoRA, load_job
from tuner.search_spaces.library_count import included_counts, take_kept_count
from tuner.search_spaces.model_facts import facts_of
from tuner.search_spaces.model_reading import counts_to_keep, take_kept_counts

QWEN2 = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
JOB = replace(load_job("tiny-gpt"), model=QWEN2)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return what a run keeps of a model that was counted elsewhere; nothing is installed here."""
    count = next(count for count in included_counts().values() if not count.get("encoder"))
    monkeypatch.setattr(library_count, "_COUNTS_OF_RUNS", {})
    monkeypatch.setattr(library_count, "_kept_file", lambda key: None)
    monkeypatch.setattr(library_count, "run_program", lambda line: count)
    monkeypatch.setattr(library_count, "is_installed", lambda: True)
    library_count._counted.cache_clear()
    found = dict(counts_to_keep(JOB)["counted_model"])
    monkeypatch.setattr(library_count, "is_installed", lambda: False)
    facts_of.cache_clear()
    yield found
    library_count._counted.cache_clear()
    facts_of.cache_clear()


def test_only_a_model_that_was_counted_for_the_run_is_kept(kept: dict[str, str]) -> None:
    assert kept.keys() == {"key", "count"}
    for shipped in ("tiny-gpt", "opt-350m", "qwen2.5-7b"):
        assert counts_to_keep(load_job(shipped)) == {}


def test_a_run_is_read_where_its_model_cannot_be_counted(
    kept: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="pip install torch transformers"):
        facts_of(JOB)
    run = RunFolder.named(tmp_path, "r")
    run.write_study({"schema": STUDY_SCHEMA, "counted_model": kept})
    assert run.read_study() is not None
    assert facts_of(JOB).parameters == json.loads(kept["count"])["parameters"]


@pytest.mark.parametrize(
    "changed",
    [
        {"count": "{"},
        {"count": "[]"},
        {"count": "{}"},
        {"count": '{"failure": "failed", "why": "x", "transformers": ""}'},
        {"count": "[" * 100_000},
        {"count": " " * (2**20 + 1)},
        {"count": 5},
        {"key": 5},
        {"key": "another"},
    ],
)
def test_a_count_that_is_bent_is_as_if_none_were_kept(
    kept: dict[str, str], changed: dict[str, Any]
) -> None:
    take_kept_count({**kept, **changed})
    with pytest.raises(InputError, match="pip install torch transformers"):
        facts_of(JOB)


def forget() -> None:
    library_count._counted.cache_clear()
    facts_of.cache_clear()


@pytest.mark.parametrize("plain", [False, True], ids=["other model", "plain decoder"])
def test_a_run_of_lora_is_read_where_its_adapters_cannot_be_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plain: bool
) -> None:
    """A plain decoder has no count; adapters named by an expression are found in the model."""
    pytest.importorskip("transformers")
    sizes = {"num_attention_heads": 4, "intermediate_size": 96, "num_key_value_heads": 2}
    model = {**QWEN2, **sizes, "model_type": "llama" if plain else "glm4"}
    model |= {"head_dim": 16, "pad_token_id": 0}
    job = replace(JOB, model=model, lora=LoRA(rank=4, targets=r".*\.layers\..*(q_proj|o_proj)"))
    monkeypatch.setattr(library_count, "_COUNTS_OF_RUNS", {})
    monkeypatch.setattr(library_count, "_kept_file", lambda key: None)
    forget()
    facts = facts_of(job)
    study = {"schema": STUDY_SCHEMA, **counts_to_keep(job)}
    assert ("counted_model" in study, "counted_adapters" in study) == (not plain, True)
    RunFolder.named(tmp_path, "r").write_study(study)
    monkeypatch.setattr(library_count, "is_installed", lambda: False)
    forget()
    with pytest.raises(InputError, match="pip install torch transformers"):
        facts_of(job)
    assert RunFolder.named(tmp_path, "r").read_study() is not None
    assert facts_of(job) == facts
    other = replace(job, lora=replace(job.lora, rank=8))
    with pytest.raises(InputError, match="pip install torch transformers"):
        facts_of(other)
    forget()


@pytest.mark.parametrize(
    "bent", [{}, {"linear": -1}, {"linear": 1.5}, {"by_peft": 1}, {"adapted": {"blocks": {}}}]
)
def test_counts_of_adapters_that_are_bent_are_as_if_none_were_kept(
    monkeypatch: pytest.MonkeyPatch, bent: dict[str, Any]
) -> None:
    monkeypatch.setattr(library_count, "_COUNTS_OF_RUNS", {})
    part = {"adapters": 1, "inputs": 1, "outputs": 1, "parameters": 2}
    report = {"adapted": {"blocks": part, "outside": part, "attention": True}, "linear": 9}
    report |= {"stacked_experts": False, "by_peft": True, **bent}
    take_kept_counts({"counted_adapters": {"key": "k", "count": json.dumps(report)}})
    assert ("k" in library_count._COUNTS_OF_RUNS) == (not bent)


@pytest.mark.parametrize("kept_of_run", [None, "text", [], {}])
def test_a_run_without_a_count_is_read(kept_of_run: object) -> None:
    take_kept_count(kept_of_run)
