"""One table over kinds of GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tuner.cli.main import main
from tuner.planning.kinds import plan_kinds, priced_clusters, several
from tuner.results.result import Result
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError

PLAN = ["plan", "opt-350m", "--space", "default", "--quiet", "--cluster"]


def kinds(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict]:  # type: ignore[type-arg]
    assert main([*words, "--json"]) == 0
    found: list[dict] = json.loads(capsys.readouterr().out)["items"]  # type: ignore[type-arg]
    return found


@pytest.mark.slow
def test_each_kind_is_at_its_own_best_and_no_run_is_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*PLAN, "a100-8=2,h100-32", "--runs-dir", str(tmp_path / "runs")]
    found = kinds(capsys, *words)
    assert [each["cluster"] for each in found] == ["a100-8", "h100-32"]
    assert not (tmp_path / "runs").exists()
    for each in found:
        words = ["plan", "opt-350m", "--space", "default", "--quiet", "--json"]
        words += ["--cluster", each["cluster"], "--runs-dir", str(tmp_path / "one")]
        assert main(words) == 0
        alone = json.loads(capsys.readouterr().out)["best"]
        assert each["best"]["configuration"] == alone["configuration"]
    priced, unpriced = found
    hours = priced["best"]["time_to_solution_s"] / 3600
    assert priced["cost"] == pytest.approx(2 * hours * 8)
    assert unpriced["cost"] is None


def test_the_table_names_what_cannot_run_and_energies_of_two_scopes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "lmm-72b", "--space", "default", "--quiet", "--cluster"]
    assert main([*words, "a100-40gb-8,jupiter-32,h200-8"]) == 0
    out = capsys.readouterr().out
    assert "does not fit on a100-40gb-8" in out
    assert "hold the hosts on jupiter-32" in out
    assert "least energy" not in out  # of two scopes
    assert out.count("fastest") == 1


@pytest.mark.parametrize(
    ("clusters", "sentence"),
    [
        ("a100-8,h100-33", "unknown cluster 'h100-33'"),
        ("a100-8,", "takes names such as"),
        ("a100-8=cheap,h100-32", "takes names such as"),
        ("a100-8=-1,h100-32", "takes names such as"),
        ("a100-8=nan,h100-32", "takes names such as"),
        ("a100-8,a100-8", "names 'a100-8' twice"),
    ],
)
def test_a_wrong_list_is_one_sentence(
    clusters: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, clusters]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_what_is_of_one_cluster_is_refused_and_no_kind_at_all_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*PLAN, "a100-8,h100-32", "--gpus", "8"]) == 2
    assert "leave out --gpus" in capsys.readouterr().err

    def nowhere(cluster: Cluster, price: float | None) -> Result:
        raise InputError(f"does not fit on {cluster.name}")

    with pytest.raises(InputError, match="does not fit on a100-8"):
        plan_kinds(priced_clusters("a100-8,h100-32"), nowhere)


def test_a_file_with_a_comma_is_one_cluster(tmp_path: Path) -> None:
    path = tmp_path / "a,b.toml"
    assert several(str(path))
    path.write_text("")
    assert not several(str(path))
    with pytest.raises(InputError, match="twice"):
        priced_clusters("a100-8=1,a100-8=2")
