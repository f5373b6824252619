"""Bad input: one sentence that says what was wrong and what is allowed, never a traceback."""

import pickle
from dataclasses import replace

import pytest

import search_spaces
from tuner.search_spaces.cluster import Cluster, Device, cluster_names, load_cluster, load_device
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import (
    InputError,
    InvalidConfiguration,
    InvalidValue,
    UnknownName,
)
from tuner.search_spaces.job import TrainingJob, job_names, load_job
from tuner.search_spaces.knobs import KNOBS, parse_value
from tuner.search_spaces.space import Auto, SearchSpace, load_space

CORE = Device("core", "cpu", 4 << 30, 5e10, 1e10, 2.0, 8.0)
TINY = load_job("tiny-gpt")


def refused(words, call, *args):
    with pytest.raises(InputError) as error:
        call(*args)
    assert all(word in str(error.value) for word in words), str(error.value)


HEAD = "sequence_length = 128\nglobal_batch = 8\nsteps = 3\n"
MODEL = '[model]\nconfig = "tiny-gpt"\n'


JOBS = [
    (HEAD, ["has no model", "tiny-gpt"]),
    (HEAD + "[model]\nconfig = true", ["model.config is True"]),
    (HEAD + '[model]\nconfig = "none.json"', ["none.json", "tiny-gpt"]),
    (HEAD + "[model]\nconfig = {}", ["has no model"]),
    (HEAD + MODEL + "other = 1", ["'other'", "config"]),
    (HEAD + "stpes = 4\n" + MODEL, ["'stpes'", "steps"]),
    (HEAD.replace("= 8", "= -8") + MODEL, ["global_batch", "-8", "at least 1"]),
    (HEAD.replace("= 8", "= true") + MODEL, ["global_batch", "True"]),
    (HEAD.replace("= 128", "= 1.5") + MODEL, ["sequence_length", "1.5"]),
    (HEAD.replace("= 3", "= 0") + MODEL, ["steps", "0"]),
    (HEAD + "tokens = 3\n" + MODEL, ["either steps or tokens"]),
    (HEAD + "precision = 'int8'\n" + MODEL, ["int8", "fp32, bf16, fp16"]),
    (HEAD + "learning_rate = -1\n" + MODEL, ["learning_rate", "-1"]),
    (HEAD + "learning_rate = 'x'\n" + MODEL, ["learning_rate", "'x'"]),
    (HEAD + "seed = true\n" + MODEL, ["seed", "True"]),
    ("= broken", ["not valid TOML"]),
]


DEVICE = (
    'type = "cuda"\nmemory_bytes = 8\npeak_flops = 1e9\nmemory_bandwidth_Bps = 1.0\n'
    "idle_W = 1\nmax_W = 5\n"
)


DEVICES = [
    (DEVICE.replace("= 8", "= '8'"), ["memory_bytes", "'8'", "integer"]),
    (DEVICE.replace("= 8", "= true"), ["memory_bytes", "True"]),
    (DEVICE.replace("cuda", "tpu"), ["tpu", "cuda or rocm or cpu"]),
    (DEVICE.replace("= 5", "= -5"), ["max_W", "-5"]),
    (DEVICE + "clocks_MHz = [5, 3]", ["clocks_MHz", "ascending"]),
    (DEVICE + "clocks_MHz = [true]", ["clocks_MHz"]),
    (DEVICE + "clocks_MHz = { min = 1, max = 5, step = 0 }", ["min, max and step"]),
    (DEVICE + "clocks_MHz = { min = [], max = 5, step = 1 }", ["min, max and step"]),
    (DEVICE + "watts = 1", ["'watts'", "max_W"]),
    ('type = "cuda"', ["incomplete", "memory_bytes"]),
]


CLUSTERS = [
    ('device = "A40"\ndevices_per_node = 0', ["devices_per_node", "at least 1"]),
    ('device = "A40"\ndevices_per_node = true', ["devices_per_node", "True"]),
    ('device = "A40"\ndevices_per_node = 2\nlink_Bps = "fast"', ["link_Bps", "fast"]),
    ('device = "A40"\ndevices_per_node = 2\nclock_control = "yes"', ["clock_control"]),
    ('device = "A41"\ndevices_per_node = 2', ["A41", "A40"]),
    ("devices_per_node = 2", ["names no device"]),
    ('device = "A40"', ["devices_per_node"]),
    ("device", ["cannot read"]),
]


SPACES = [
    ("what = 'x'", ["no table [knobs]"]),
    ("[knobs]", ["no table [knobs]"]),
    ("[knobs]\nbatch = [1]", ["unknown knob 'batch'", "micro_batch"]),
    ("[knobs]\nmicro_batch = []", ["micro_batch", "not empty"]),
    ("[knobs]\nmicro_batch = [-1]", ["micro_batch", "-1", "at least 1"]),
    ("[knobs]\nmicro_batch = [true]", ["micro_batch", "True"]),
    ("[knobs]\nmicro_batch = 'all'", ["micro_batch", "all", "auto"]),
    ("[knobs]\nmicro_batch = 4", ["micro_batch", "4", "list"]),
    ("[knobs]\nmicro_batch = { max = 0 }", ["max", "at least 1"]),
    ("[knobs]\nmicro_batch = { count = 2 }", ["'count'", "max"]),
    ("[knobs]\nzero_stage = { max = 2 }", ["'max'"]),
    ("[knobs]\nzero_stage = [1.0]", ["zero_stage", "1.0"]),
    ("[knobs]\nclock_MHz = 'baseline'", ["baseline", "launch knobs"]),
    ("[knobs]\nclock_MHz = { lowest_share = 2 }", ["lowest_share", "0 to 1"]),
    ("[knobs]\nclock_MHz = [[1200, [3]]]", ["clock_MHz"]),
    ("[knob]\nmicro_batch = [1]", ["'knob'", "knobs"]),
    ("[knobs", ["cannot read"]),
]


@pytest.mark.parametrize(
    ("load", "text", "words"),
    [
        *((load_job, *row) for row in JOBS),
        *((load_device, *row) for row in DEVICES),
        *((load_cluster, *row) for row in CLUSTERS),
        *((load_space, *row) for row in SPACES),
    ],
)
def test_a_file(tmp_path, load, text, words):
    path = tmp_path / "given.toml"
    path.write_text(text)
    refused(words, load, str(path))


def test_space_of_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[knobs]\nclock_MHz = [1980, [1980, 1200]]\npipeline_parallel = [1, 2]\n")
    space = load_space(path)
    assert space.name == "mine"
    candidates = space.candidates(load_job("qwen2.5-7b"), load_cluster("h100-32"))
    # One stage takes the one clock, two stages the pair as well; both may be left alone.
    assert [len(lives) for lives in candidates.lives] == [2, 3]


@pytest.mark.parametrize("load", [load_job, load_cluster, load_space, load_device])
def test_unknown_names_list_what_is_known(load):
    with pytest.raises(UnknownName) as error:
        load("nowhere")
    assert error.value.name == "nowhere"
    assert error.value.choices[-1].startswith("or the path")
    assert len(error.value.choices) > 1


def test_everything_shipped_can_be_loaded():
    for name in job_names():
        assert load_job(name).steps >= 1
    for name in cluster_names():
        cluster = load_cluster(name)
        assert cluster.sources
        assert cluster.device.sources
        assert cluster.name == name


@pytest.mark.parametrize(
    ("choices", "job", "words"),
    [
        ({"data_parallel": (2,)}, TINY, ["ranks_fit", "1 of 1", "2 devices", "has 1"]),
        ({"data_parallel": (2, 4)}, TINY, ["rule ranks_fit refuses 2 of 2"]),
        ({"micro_batch": Auto()}, replace(TINY, precision="fp16"), ["fp16", "4 of 4"]),
        (
            {"micro_batch": (2, 4)},
            replace(TINY, global_batch=7),
            ["rule global_batch refuses 2 of 2", "global batch 7", "micro_batch can be 1 or 7"],
        ),
        (
            # Stage 1 is refused once a micro-batch, one device too few once for each of both.
            {"data_parallel": (1, 2), "micro_batch": (1, 2), "zero_stage": (1,)},
            TINY,
            ["refuses 2 of 4"],
        ),
    ],
)
def test_empty_result_names_the_rule_that_refused_the_most(choices, job, words):
    space = SearchSpace("narrow", choices)
    refused(
        ["space 'narrow' has no configuration", *words],
        space.candidates,
        job,
        Cluster("this-machine", CORE, 1),
    )


def test_clocks_that_the_device_does_not_offer():
    space = SearchSpace("fast", {"clock_MHz": (5000,)})
    refused(
        ["5000", "nearest is 1980"],
        space.candidates,
        load_job("qwen2.5-7b"),
        load_cluster("h100-32"),
    )
    # Where clocks cannot be set at all the clock is a fixed dimension, not an error.
    assert len(space.candidates(TINY, Cluster("this-machine", CORE, 1))) == 1


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("nope", "1", ["unknown knob 'nope'"]),
        ("zero_stage", "4", ["zero_stage", "0, 1, 2, 3"]),
        ("zero_stage", "1.0", ["zero_stage"]),
        ("data_parallel", "0", ["data_parallel", "at least 1"]),
        ("clock_MHz", "-3", ["clock_MHz", "-3"]),
        ("clock_MHz", "1200,", ["clock_MHz"]),
        ("micro_batch", "2,4", ["micro_batch"]),
        ("optimizer_offload", "disk", ["none, cpu, async"]),
    ],
)
def test_knob_on_the_command_line(name, text, words):
    refused(words, parse_value, name, text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("zero_stage", 1.0),
        ("zero_stage", True),
        ("zero_stage", [1]),
        ("clock_MHz", (1200, (1200,))),
        ("clock_MHz", [1200, True]),
        ("clock_MHz", []),
        ("clock_MHz", 1200.0),
        ("micro_batch", None),
    ],
)
def test_knob_of_the_wrong_type(name, value):
    refused([name], KNOBS[name].check, value)


@pytest.mark.parametrize(
    "data", [{}, {"launch": 3}, {"launch": {"a": {}}}, {"launch": {}, "live": 3}]
)
def test_json_that_is_no_configuration(data):
    refused(["is not a configuration"], Configuration.from_json, data)


def test_json_that_is_no_job():
    refused(["is not a job"], TrainingJob.from_json, {"name": "x"})
    assert TrainingJob.from_json(TINY.to_json()) == TINY


def test_the_room_exports_what_it_says():
    for name in search_spaces.__all__:
        assert getattr(search_spaces, name) is not None


@pytest.mark.parametrize(
    "error",
    [
        UnknownName("knob", "x", ["y"]),
        InvalidValue("steps", 0, "at least 1"),
        InvalidConfiguration("a=1", ["why"]),
        InputError("the schema a\nb\r\n\u2028c is unknown"),
    ],
)
def test_every_error_is_one_line_and_travels_between_processes(error: InputError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert len(str(error).splitlines()) == 1
    assert vars(again) == vars(error)


def test_a_mark_that_windows_writes_is_read_over(tmp_path):
    file = tmp_path / "job.toml"
    text = 'sequence_length = 128\nglobal_batch = 16\nsteps = 10\n[model]\nconfig = "tiny-gpt"\n'
    file.write_text(text.replace("\n", "\r\n"), encoding="utf-8-sig")
    assert load_job(file).steps == 10
