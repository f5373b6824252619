"""`tuner fit` as a user sees it: verdict, parts, limits, changes, exit codes."""

import json
from pathlib import Path

import pytest

from tuner.cli.main import main


def run(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str, str]:
    code = main(["fit", *words.split()])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_job_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "opt-350m dp8 mb4 zero1 --cluster a100-8")
    assert code == 0
    assert out.startswith(
        "Predicted, not measured: opt-350m on a100-8, 8 of 8 GPUs\n  dp8 mb4 zero1\n  fits: "
    )
    for part in ("parameters", "gradients", "optimizer", "activations", "temporary"):
        assert f" {part} " in out
    assert "2,048, as long as the model allows" in out
    assert "change" not in out


def test_a_job_that_does_not_fit_gets_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "qwen2.5-7b dp8 mb2 zero1 --cluster a100-40gb-8")
    assert code == 3
    assert "does not fit: " in out
    assert "GB too many" in out
    assert "Cheapest change that fits\n  " in out
    assert "none fits" in out


def test_clocks_that_are_unknown_are_not_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a device by its data sheet alone no clock is known, and it does not run at 1 MHz."""
    _, out, _ = run(capsys, "opt-350m --cluster 8xB300")
    assert "MHz" not in out
    assert json.loads(run(capsys, "opt-350m --cluster 8xB300 --json")[1])["clock_MHz"] is None
    assert ", devices at 1410 MHz" in run(capsys, "opt-350m --cluster a100-8")[1]


def test_json_has_bytes_and_changes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "qwen2.5-7b dp8 mb2 zero1 --cluster a100-40gb-8 --json")
    said = json.loads(out)
    assert (code, said["fits"], said["predicted"]) == (3, False, True)
    assert sum(said["parts"].values()) == pytest.approx(said["memory_bytes"])
    assert said["spare_bytes"] == pytest.approx(said["capacity_bytes"] - said["memory_bytes"])
    assert said["changes"][0]["probability"] >= 0.9
    assert said["largest_micro_batch"]["likely"] == 0
    assert (said["precision"], said["program"]["optimizer"], said["lora"]) == (
        "bf16",
        "adamw",
        None,
    )
    # Counted exactly, so without a doubt.
    assert (said["doubts"], said["parameter_count"]) == ([], 7_615_616_512)
    assert 0 <= said["probability"] <= 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("qwen2.5-7b tp16 --cluster a100-8", "it needs 16 devices"),
        ("qwen2.5-7b opt-350m --cluster a100-8", "is a second job"),
        ("qwen2.5-7b wings=2 --cluster a100-8", "wings"),
        ("qwen2.5-7b --cluster a100-8 --gpus 12", "a multiple of the 8 devices of a node"),
        ("nothing --cluster a100-8", "nothing"),
    ],
)
def test_nonsense_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    code, out, err = run(capsys, words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert sentence in err


STATED = """
name = "own"
sequence_length = 1024
global_batch = 32
steps = 10
[model]
config = "opt-350m"
[lora]
rank = 8
quantization = "nf4"
[program]
optimizer = "adamw_8bit"
pure_bf16 = true
"""


def test_json_names_the_facts_that_it_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Those that the job states, and those that are assumed of its program."""
    job = tmp_path / "own.toml"
    job.write_text(STATED)
    own, shipped = (
        json.loads(run(capsys, f"{name} --cluster cpu-2 --json")[1]) for name in (job, "opt-350m")
    )
    assert (own["lora"]["quantization"], shipped["lora"]) == ("nf4", None)
    program = own["program"]
    assert (program["optimizer"], program["pure_bf16"]) == ("adamw_8bit", True)
    assert (shipped["program"]["optimizer"], shipped["program"]["pure_bf16"]) == ("adamw", False)
    assert program["fused_attention"] == shipped["program"]["fused_attention"]
    # A job that states a part leaves the rest assumed.
    assert "is assumed as in the built-in program" in run(capsys, f"{job} --cluster cpu-2")[1]


@pytest.fixture
def unlisted_job(tmp_path):
    """A job of a family that transformers does not have."""
    pytest.importorskip("transformers")
    sizes = '"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16'
    config = f'{{"model_type": "unheard_of", {sizes}, "vocab_size": 32000}}'
    (tmp_path / "config.json").write_text(config)
    job = tmp_path / "job.toml"
    job.write_text(
        "sequence_length = 1024\nglobal_batch = 64\nsteps = 10\n[model]\nconfig = 'config.json'\n"
    )
    return str(job)


def test_a_doubted_answer_begins_with_the_doubt_and_has_no_probability(unlisted_job, capsys):
    main(["fit", unlisted_job, "--cluster", "a100-8"])
    printed = capsys.readouterr().out
    assert printed.startswith("Doubtful: transformers ")
    assert "has no model_type unheard_of" in printed.splitlines()[0]
    assert "probability of fitting" not in printed
    main(["fit", unlisted_job, "--cluster", "cpu-2", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["probability"] is None
    assert data["largest_micro_batch"]["sure"] is None
    assert len(data["doubts"]) == 1
    assert data["parameter_count"] > 1e8


def test_without_transformers_other_models_than_plain_decoders_name_what_to_install(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("tuner.search_spaces.library_count.is_installed", lambda: False)
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    code, out, err = run(capsys, f"{tmp_path / 'config.json'} --cluster a100-8")
    assert (code, out) == (2, "")
    assert err.strip().endswith("pip install torch transformers")
    assert len(err.splitlines()) == 1
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code, out, _ = run(capsys, f"{tmp_path / 'config.json'} --cluster a100-8 --json")
    assert json.loads(out)["doubts"] == []
    for included in ("qwen2.5-7b", "olmoe-1b-7b", "lmm-7b"):
        assert json.loads(run(capsys, f"{included} --cluster a100-8 --json")[1])["doubts"] == []


def test_a_doubted_plan_begins_with_the_doubt(unlisted_job, capsys, tmp_path):
    run = ["--cluster", "a100-8", "--runs-dir", str(tmp_path / "runs"), "--quiet"]
    main(["plan", unlisted_job, *run, "--name", "one"])
    assert capsys.readouterr().out.lstrip().startswith("Doubtful: transformers ")
    main(["show", "one", "--runs-dir", str(tmp_path / "runs"), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert len(data["doubts"]) == 1
    assert data["parameter_count"] > 1e8
    assert {point["p_nondominated"] for point in data["points"]} == {None}


LLAMA = {
    **{"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "vocab_size": 32000},
    **{"num_attention_heads": 16, "intermediate_size": 5632, "max_position_embeddings": 2048},
}


def test_a_model_alone_is_answered_with_what_was_assumed(capsys, tmp_path) -> None:
    file = tmp_path / "small" / "config.json"
    file.parent.mkdir()
    file.write_text("\ufeff" + json.dumps(LLAMA), encoding="utf-8")
    code, out, _ = run(capsys, f"{file.parent} --cluster a100-8")
    assert code == 0
    assert out.startswith("Predicted, not measured: small on a100-8")
    assert (
        "assumed: 2,048 tokens a sequence (--sequence-length), 256 sequences a step "
        "(--global-batch), AdamW in bf16, all parameters trained\n"
    ) in out
    assert "whole training" not in out  # of unknown length
    file.write_text(json.dumps(LLAMA), encoding="utf-8")
    code, out, _ = run(capsys, f"{file} --cluster cpu-2 --sequence-length 512")
    assert "assumed: 256 sequences a step (--global-batch), AdamW" in out
    code, out, _ = run(capsys, f"{file} --cluster cpu-2 --sequence-length 512 --global-batch 8")
    assert "assumed: AdamW in bf16, all parameters trained\n" in out


def test_a_model_of_the_cache_is_found_by_its_name(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--some--model-1.5"
    for revision, layers in (("old", 8), ("new", 16)):
        (folder / "snapshots" / revision).mkdir(parents=True)
        config = folder / "snapshots" / revision / "config.json"
        config.write_text(json.dumps({**LLAMA, "num_hidden_layers": layers}))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("old")  # not the newest
    _, out, _ = run(capsys, "some/model-1.5 --cluster cpu-2 --json")
    block = 4 * 2048**2 + 3 * 2048 * 5632 + 2 * 2048
    assert json.loads(out)["parameter_count"] == 2 * 32000 * 2048 + 8 * block + 2048
    code, out, err = run(capsys, "some/other --cluster a100-8")
    assert (code, out) == (2, "")
    assert "hf download some/other config.json" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "a JSON object"),
        ("{}", "names no model_type"),
        ("{", "cannot read"),
        ('{"_class_name": "FluxTransformer2DModel"}', "a model of diffusers; it"),
        ('{"_class_name": "FluxTransformer2DModel"}', "tuner optimize -- COMMAND"),
        ('{"_class_name": "os.system"}', "it was not counted"),
        ('{"_class_name": "' + "x" * 9999 + '"}', "a model of diffusers; it was not counted"),
        ('{"_class_name": 5}', "names no model_type"),
    ],
)
def test_a_json_file_that_is_no_model_is_one_sentence(capsys, tmp_path, text, words) -> None:
    (tmp_path / "config.json").write_text(text)
    code, out, err = run(capsys, f"{tmp_path / 'config.json'} --cluster a100-8")
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_large_file_is_not_read_and_a_large_value_is_shortened(capsys, tmp_path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**LLAMA, "_name_or_path": "a" * 2**20}))
    code, _, err = run(capsys, f"{config} --cluster a100-8")
    assert code == 2
    assert "it has more than 1 MiB" in err
    config.write_text(json.dumps({**LLAMA, "vocab_size": [[[8] * 1000] * 10] * 10}))
    code, _, err = run(capsys, f"{config} --cluster a100-8")
    assert code == 2
    assert "vocab_size of the model config is [[" in err
    assert len(err) < 1000


def test_the_batch_of_a_job_can_be_another(capsys) -> None:
    _, out, _ = run(capsys, "qwen2.5-7b dp8 mb1 zero3 --cluster a100-8 --global-batch 16 --json")
    assert json.loads(out)["largest_micro_batch"]["likely"] <= 2
