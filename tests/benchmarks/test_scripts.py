"""The benchmark of other projects' scripts: its list, their sources, and what it reads back."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from benchmarks.scripts import __main__ as scripts
from benchmarks.scripts.environment import Unavailable, checkout
from benchmarks.scripts.inputs import _texts, sentences


def _repository(where: Path) -> str:
    """Make a repository OWNER/NAME with two folders; return its commit."""
    for name in ("one/train.py", "two/large.bin"):
        file = where / name
        file.parent.mkdir(parents=True)
        file.write_text(name)
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=where, check=True)
    said = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=where, check=True, capture_output=True, text=True
    )
    return said.stdout.strip()


def test_a_source_is_checked_out_at_its_commit_and_its_folder_alone(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    commit = _repository(sources / "owner" / "name")
    (sources / "owner/name/one/train.py").write_text("changed since")
    tree = checkout("owner/name", commit, "one", tmp_path / "cache", sources)
    assert (tree / "one/train.py").read_text() == "one/train.py"
    assert not (tree / "two").exists()
    whole = checkout("owner/name", commit, ".", tmp_path / "cache", sources)
    assert (whole / "two/large.bin").is_file()
    again = checkout("owner/name", commit, ".", tmp_path / "other", sources)
    assert (again / "two/large.bin").is_file()


def test_a_source_that_is_not_there_is_told(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    _repository(sources / "owner" / "name")
    with pytest.raises(Unavailable, match="git archive name"):
        checkout("owner/name", "0" * 40, ".", tmp_path / "cache", sources)
    with pytest.raises(Unavailable, match="does not exist"):
        checkout("owner/other", "0" * 40, ".", tmp_path / "cache", sources)


def test_every_listed_script_has_a_pinned_source_and_a_name_of_its_own() -> None:
    packages, without, listed = scripts.listed()
    pinned = {requirement.partition("==")[0] for requirement in [*packages, *without]}
    assert all("==" in requirement for requirement in [*packages, *without])
    assert len({script.slug for script in listed}) == len(listed) >= 12
    for script in listed:
        if script.repository:
            assert len(script.commit) == 40
            assert not script.source
        else:
            assert script.source.split()[0] in pinned | {"accelerate"}
        assert shlex.split(script.command)


def test_a_script_starts_in_a_fresh_folder_with_its_inputs(tmp_path: Path) -> None:
    commit = _repository(tmp_path / "sources" / "owner" / "name")
    (tmp_path / "cache" / "inputs" / "text").mkdir(parents=True)
    script = scripts.Listed(
        "A B", "train.py", repository="owner/name", commit=commit, folder="one",
        links={"data/text": "text"},
    )  # fmt: skip
    for _ in range(2):
        folder = scripts.prepare(script, tmp_path / "cache", tmp_path / "sources")
        assert not (folder / "left.txt").exists()
        (folder / "left.txt").write_text("from the run before")
        assert (folder / "data/text").is_dir()
    assert folder.parts[-2:] == ("a-b", "one")


def test_an_outcome_is_kept_for_the_same_search_alone(tmp_path: Path) -> None:
    script = scripts.Listed("A", "train.py --x 1", source="a 1")
    file = tmp_path / "a.json"
    outcome = scripts.Outcome(script, knobs=("micro_batch",), energy=0.5, answer="mb8")
    scripts.store(outcome, file, 12)
    assert scripts.stored(script, file, 12) == outcome
    assert scripts.stored(script, file, 6) is None
    changed = scripts.Listed("A", "train.py --x 2", source="a 1")
    assert scripts.stored(changed, file, 12) is None


def test_figures_count_the_scripts_with_an_answer() -> None:
    one = scripts.Listed("One", "a.py", source="a 1")
    outcomes = [
        scripts.Outcome(one, knobs=("a", "b"), energy=0.5, time=0.25, launch_s=2.0, answer="mb8"),
        scripts.Outcome(one, why="it failed"),
    ]
    found = {figure.name: figure.value for figure in scripts.figures(outcomes)}
    assert (found["scripts_tried"], found["scripts_tuned"]) == (2, 1)
    assert (found["knobs_in_play_median"], found["one_energy_saved"]) == (2, 0.5)
    assert "no answer: it failed" in outcomes[1].line()


def test_texts_are_the_same_in_every_run() -> None:
    first = list(sentences(3))
    assert first == list(sentences(3))
    assert all(len(text.split()) == 40 for text in first)


def test_wikitext_has_the_configuration_that_scripts_name(tmp_path: Path) -> None:
    _texts(tmp_path)
    _, card, _ = (tmp_path / "wikitext" / "README.md").read_text().split("---\n")
    (named,) = yaml.safe_load(card)["configs"]
    assert named["config_name"] == "wikitext-2-v1"
    assert [part["split"] for part in named["data_files"]] == ["train", "validation"]
    for part in named["data_files"]:
        lines = (tmp_path / "wikitext" / part["path"]).read_text().splitlines()
        assert json.loads(lines[0])["text"]
