"""A user's script without starting it: its command, what its frame turns, how it is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.scripts import CPU, script_job
from tests.support.scripts import GPU as TWO_NODES
from tests.support.studies import problem_of_job
from tuner.cli.main import main
from tuner.deploy.launch_files import write_launch_files
from tuner.problem.study_spec import parse_job
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.space import load_space
from tuner.workload import hook
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.inspection import blank_job
from tuner.workload.scripts.script_facts import ScriptFacts
from tuner.workload.scripts.script_job import ScriptJob

GPU = replace(TWO_NODES, nodes=1)
CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "stage3_max_live_parameters": 7,
        "offload_param": {"device": "cpu"},
    },
}
FRAMEWORK = ScriptFacts(
    "deepspeed", config=CONFIG, micro_batch=4, accumulation=2, follows=True, measured=True
)


def job(command: str, folder: Path, frame: ScriptFacts = FRAMEWORK, **changes: object) -> ScriptJob:
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    return script_job(command, folder, frame, **{"global_batch": 16, **changes})


# ---- the command


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train.py --name 'a b'", ("train.py", "--name", "a b")),
        ("python3.11 train.py", ("train.py",)),
        ("/usr/bin/python train.py", ("train.py",)),
        ("-m package.train x", ("-m", "package.train", "x")),
    ],
)
def test_words_of_a_command(tmp_path: Path, command: str, words: tuple[str, ...]) -> None:
    (tmp_path / "train.py").touch()
    assert Script(command, cwd=tmp_path).words == words


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("", "needs a command"),
        ("nowhere.py", "no script 'nowhere.py'"),
        ("mpirun -n 2 python train.py", "mpirun starts ranks itself"),
        ("train.py --x {micro_bach}", "unknown placeholder 'micro_bach'"),
        ("train.py --x {zero_stage=7}", "zero_stage"),
        ("train.py 'x", "cannot be read"),
        ("-m", "module"),
    ],
)
def test_a_command_that_cannot_be_is_one_sentence(
    tmp_path: Path, command: str, sentence: str
) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(InputError, match=sentence):
        _ = Script(command, cwd=tmp_path).words


def test_the_command_line_refuses_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ["--runs-dir", str(tmp_path)]
    assert main(["dev", "probe", "--script", "nowhere.py", *runs]) == 2
    assert "no script 'nowhere.py'" in capsys.readouterr().err
    assert main(["optimize", "tiny-gpt", "--script", "nowhere.py", *runs]) == 2
    assert "either the job" in capsys.readouterr().err
    assert main(["optimize", "--steps", "5", *runs]) == 2
    assert "--steps is for --script" in capsys.readouterr().err
    script = ["--script", str(tmp_path / "train.py"), "--cluster", "gh200-32"]
    (tmp_path / "train.py").touch()
    assert main(["optimize", *script, *runs]) == 2
    assert "tuner plan JOB --cluster gh200-32" in capsys.readouterr().err
    assert main(["optimize", *script, *runs, "--executor", "simulated"]) == 2
    assert "not simulated" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]


# ---- what can be turned


def turned(made: ScriptJob) -> set[str]:
    return {name for name, offer in made.offers.items() if offer.turned}


BATCH = {"data_parallel", "micro_batch"}
STATES = {"zero_stage", "zero_hpz_partition_size", "optimizer_offload", "parameter_offload"}


@pytest.mark.parametrize(
    ("command", "frame", "expected"),
    [
        # DeepSpeed, batches from it.
        ("train.py --ds ds.json", FRAMEWORK, BATCH | STATES),
        # DeepSpeed, batches of its own.
        ("train.py", replace(FRAMEWORK, follows=False), {"data_parallel"} | STATES),
        ("train.py --b {micro_batch}", replace(FRAMEWORK, follows=False), BATCH | STATES),
        # A framework that owns batches and accumulation.
        ("train.py", replace(FRAMEWORK, follows=False, owner="transformers"), STATES),
        (
            "train.py --b {micro_batch} --a {gradient_accumulation}",
            replace(FRAMEWORK, follows=False, owner="transformers"),
            BATCH | STATES,
        ),
        (
            "train.py",
            replace(FRAMEWORK, can_checkpoint=True),
            BATCH | STATES | {"activation_checkpointing"},
        ),
        # Plain torch.
        ("train.py", ScriptFacts("torch"), set()),
        ("train.py --b {micro_batch=4}", ScriptFacts("torch"), set()),
        ("train.py --b {micro_batch=4} --a {gradient_accumulation}", ScriptFacts("torch"), BATCH),
        # Asked for by the script.
        ("train.py", ScriptFacts("torch", reads=("activation_offload",)), {"activation_offload"}),
        ("train.py", ScriptFacts("torch", reads=("pipeline_parallel",)), set()),
    ],
)
def test_only_what_the_frame_turns_is_offered(
    tmp_path: Path, command: str, frame: ScriptFacts, expected: set[str]
) -> None:
    made = job(command, tmp_path, frame)
    assert turned(made) == expected
    told = " ".join(made.sentences())
    for name in made.offers:
        assert name in told
    for name, offer in made.offers.items():
        assert offer.turned or offer.why in told, name


def test_parallelism_inside_the_model_needs_its_sizes(tmp_path: Path) -> None:
    asks = ScriptFacts("torch", reads=("pipeline_parallel",))
    made = job("train.py", tmp_path, asks)
    assert "--model-config" in made.offers["pipeline_parallel"].why
    llama = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4}
    assert job("train.py", tmp_path, asks, model=llama).offers["pipeline_parallel"].turned


def test_a_space_is_narrowed_to_what_the_script_turns(tmp_path: Path) -> None:
    fixed = replace(FRAMEWORK, follows=False, owner="transformers", client_optimizer="AdamW")
    made = job("train.py", tmp_path, fixed)
    problem = problem_of_job(made, CPU)
    launches = problem.candidates.launches
    assert {launch["micro_batch"] for launch in launches} == {4}
    assert {launch["data_parallel"] for launch in launches} == {2}
    assert {launch["zero_stage"] for launch in launches} == {0, 1, 2, 3}
    assert problem.baseline is not None
    assert problem.candidates.index_of(made.baseline) == problem.candidates.index_of(
        problem.baseline
    )
    assert problem.prior is None
    assert any("in play: zero_stage, optimizer_offload" in note for note in problem.notes)


def test_the_baseline_is_what_the_user_runs(tmp_path: Path) -> None:
    baseline = job("train.py", tmp_path).baseline
    assert (baseline.data_parallel, baseline.micro_batch, baseline.zero_stage) == (2, 4, 3)
    assert baseline.get("parameter_offload") == "cpu"
    assert job("train.py", tmp_path).refused(baseline) == []


def test_a_value_that_the_script_cannot_take_is_refused(tmp_path: Path) -> None:
    own = job("train.py", tmp_path, replace(FRAMEWORK, follows=False, client_optimizer="Lion"))
    assert "was found that sets its batch size" in own.refused(Configuration.of(micro_batch=2))[0]
    assert "async" in own.refused(Configuration.of(optimizer_offload="async", zero_stage=3))[-1]


# ---- how it starts


def test_a_configuration_is_laid_over_and_the_rest_is_kept(tmp_path: Path) -> None:
    made = job("train.py --ds ds.json --log=ds.json", tmp_path)
    chosen = Configuration.of(data_parallel=1, micro_batch=8, zero_stage=1, optimizer_offload="cpu")
    start = made.start(chosen, tmp_path / "probe")
    config = json.loads((tmp_path / "probe" / "ds_config.json").read_text())
    assert config == start.config
    assert config["train_batch_size"] == 16
    assert config["train_micro_batch_size_per_gpu"] == 8
    assert config["gradient_accumulation_steps"] == 2
    for kept in ("optimizer", "scheduler", "bf16"):
        assert config[kept] == CONFIG[kept]
    zero = config["zero_optimization"]
    assert zero["stage"] == 1
    assert zero["offload_optimizer"]["device"] == "cpu"
    assert zero["stage3_max_live_parameters"] == 7
    assert "offload_param" not in zero
    assert config["wandb"] == {"enabled": False}
    assert start.words == (
        "train.py",
        "--ds",
        str(tmp_path / "probe/ds_config.json"),
        "--log=ds.json",
    )
    assert start.options["quiet"]
    assert start.options["micro_batch"] == 8
    # What the hook lays over the dictionary of a script that reads no file comes to the same.
    assert hook.merge(CONFIG, start.options["deepspeed"]) == config
    assert hook.merge(config, start.options["deepspeed"]) == config


def test_transformers_auto_values_stay_auto(tmp_path: Path) -> None:
    auto = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    owned = replace(FRAMEWORK, config=auto, owner="transformers", follows=False)
    start = job("train.py", tmp_path, owned).start(
        Configuration.of(data_parallel=2, micro_batch=4, zero_stage=2), tmp_path
    )
    assert start.config["train_micro_batch_size_per_gpu"] == "auto"
    assert start.config["zero_optimization"]["stage"] == 2
    # Its arguments are set by the command, and it fills "auto" in from them.
    made = job("train.py -b {micro_batch=4} -a {gradient_accumulation=2}", tmp_path, owned)
    start = made.start(Configuration.of(data_parallel=2, micro_batch=2), tmp_path)
    assert start.config["train_micro_batch_size_per_gpu"] == "auto"
    assert start.words == ("train.py", "-b", "2", "-a", "4")


def test_a_client_optimizer_stays_the_users(tmp_path: Path) -> None:
    own = replace(FRAMEWORK, client_optimizer="AdamW", config={"train_batch_size": 16})
    made = job("train.py", tmp_path, own)
    chosen = Configuration.of(micro_batch=4, zero_stage=2, optimizer_offload="cpu")
    said = made.start(chosen, tmp_path / "p").options["deepspeed"]
    assert said["zero_allow_untested_optimizer"] is True
    assert said["zero_force_ds_cpu_optimizer"] is False
    assert "optimizer" not in said


def test_the_accumulation_that_a_command_states_holds_while_its_batch_is_unknown(
    tmp_path: Path,
) -> None:
    """The look at a script, before any batch was seen, must not accumulate 0 micro-batches."""
    (tmp_path / "train.py").touch()
    script = Script("train.py -a {gradient_accumulation=2}", cwd=tmp_path)
    unknown = blank_job(script, load_cluster("cpu-2"))
    assert unknown.global_batch == 0
    start = unknown.start(unknown.baseline, tmp_path)
    assert start.words[1:] == ("-a", "2")


def test_placeholders_are_filled_in(tmp_path: Path) -> None:
    made = job(
        "train.py -b{micro_batch=4} {gradient_accumulation=2} {zero_stage} {rank}/{world_size} "
        "{deepspeed_config=ds.json}",
        tmp_path,
    )
    start = made.start(Configuration.of(data_parallel=2, micro_batch=2, zero_stage=1), tmp_path)
    path = str(tmp_path / "ds_config.json")
    assert start.argv(1, 2) == ("train.py", "-b2", "4", "1", "1/2", path)
    assert json.loads(Path(path).read_text())["optimizer"] == CONFIG["optimizer"]


def test_the_job_survives_study_toml(tmp_path: Path) -> None:
    made = job("train.py --b {micro_batch=4}", tmp_path, replace(FRAMEWORK, reads=("zero_stage",)))
    problem = problem_of_job(made, CPU)
    again = parse_job(json.loads(json.dumps(problem.identity)))
    assert again == made
    assert isinstance(again, ScriptJob)
    assert again.frame == made.frame
    with pytest.raises(InputError, match="job"):
        ScriptJob.from_json({"frame": "{}"})


def test_one_space_serves_every_script(tmp_path: Path) -> None:
    made = job("train.py", tmp_path, global_batch=64, devices=8)
    narrowed = made.narrowed(load_space("default"))
    launches = narrowed.candidates(made, GPU).launches
    assert {launch["data_parallel"] for launch in launches} == {1, 2, 4, 8}
    assert {launch["parameter_offload"] for launch in launches} == {"none", "cpu"}
    assert made.baseline in narrowed.candidates(made, GPU)


# ---- the hook's parts that need no training


def test_the_same_batch_in_other_micro_batches() -> None:
    batch = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
    assert hook.micro_batches(batch, 2) == (4, 2)
    assert hook.micro_batches({"train_batch_size": 16}, 2) == (8, 1)
    assert hook.micro_batches({"train_batch_size": "auto"}, 2) == (0, 0)
    other = hook.split_differently(batch, 2)
    assert hook.micro_batches(hook.merge(batch, other), 2) == (2, 4)
    assert hook.split_differently({"train_micro_batch_size_per_gpu": 1}, 2) == {}


def test_merge_takes_away_what_is_null_at_any_depth() -> None:
    base = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert hook.merge(base, {"a": {"c": None, "f": {"g": None}}, "e": None}) == {
        "a": {"b": 1, "f": {}}
    }
    assert base["e"] == 3


def test_the_hook_needs_the_standard_library_alone(tmp_path: Path) -> None:
    """Outside a probe its answers are empty, and no package of ours is imported."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import hook; "
        "assert hook.configuration() == {}; hook.phase('x'); hook.step(); "
        "bad = {'tuner', 'search_spaces', 'workload', 'torch', 'numpy'} & set(sys.modules); "
        "assert not bad, bad"
    )
    folder = str(Path(hook.__file__).parent.parent)
    subprocess.run([sys.executable, "-P", "-c", code, folder], check=True, cwd=tmp_path)


# ---- the files that start it


def dry_run(folder: Path) -> tuple[list[str], str]:
    """The command line that launch.sh would start, and the folder it starts in."""
    shown = folder / "show.py"
    shown.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([sys.argv[1:], os.getcwd()]))\n"
    )
    shown.chmod(0o755)
    done = subprocess.run(
        ["bash", str(folder / "launch.sh")],
        env={**os.environ, "PYTHON": str(shown)},
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    argv, cwd = json.loads(done.stdout)
    return argv, cwd


def test_launch_files_start_the_script_as_chosen(tmp_path: Path) -> None:
    made = job("train.py --ds ds.json --text 'a;b'", tmp_path, devices=8)
    chosen = Configuration.of(data_parallel=4, micro_batch=2, zero_stage=2)
    write_launch_files((chosen, made, GPU), tmp_path / "best")
    argv, cwd = dry_run(tmp_path / "best")
    path = str((tmp_path / "best" / "ds_config.json").resolve())
    assert argv[-5:] == ["train.py", "--ds", path, "--text", "a;b"]
    assert "--nproc-per-node=4" in argv
    assert cwd == str(tmp_path.resolve())
    config = json.loads(Path(path).read_text())
    assert (config["train_micro_batch_size_per_gpu"], config["zero_optimization"]["stage"]) == (
        2,
        2,
    )
    assert "wandb" not in config
    assert not (tmp_path / "best" / "joulefront_hook").exists()


def test_the_hook_goes_along_only_where_it_is_needed(tmp_path: Path) -> None:
    made = job("train.py", tmp_path, replace(FRAMEWORK, reads=("activation_offload",)))
    write_launch_files((made.baseline, made, GPU), tmp_path / "best")
    argv, _ = dry_run(tmp_path / "best")
    started = (tmp_path / "best/joulefront_hook/__main__.py").resolve()
    assert argv[-3:] == [str(started), "run", "train.py"]
    options = json.loads((tmp_path / "best" / "options.json").read_text())
    assert options["quiet"] is False
    assert "micro_batch" not in options
