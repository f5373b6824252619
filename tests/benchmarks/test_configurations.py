"""The table of public configurations, and the comparison with what is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.configurations import COMMITS, TABLE, wrong_values
from benchmarks.validation.comparison import rows_of
from tuner.workload.scripts.frameworks.commands import training_of_file


def test_files_each_once_of_known_commits() -> None:
    rows = rows_of(TABLE)
    assert len({(row["repository"], row["path"]) for row in rows}) == 130
    assert {row["repository"] for row in rows} == {*COMMITS}
    compared = [row for row in rows if row["model"]]
    assert len(compared) == 106
    assert all(all(row.values()) for row in compared)


def test_a_value_that_differs_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yml").write_text(
        "base_model: a/b\nmicro_batch_size: 2\nsequence_len: 512\nbf16: true\n"
    )
    row = {
        **{"model": "a/b", "micro_batch": "2", "accumulation": "1", "tokens": "512"},
        **{"precision": "bf16", "sharding": "none", "rank": "0", "quantization": "none"},
    }
    training = training_of_file("a.yml", 8)
    assert wrong_values(row, training) == []
    assert wrong_values({**row, "accumulation": "4"}, training) == ["accumulation is 1, not 4"]
