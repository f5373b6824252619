"""The agent around a training: real small trainings, the twin GPU node, and devices that fail."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.twin import TwinNode
from tests.twin.specimens import CORE_GPU
from tests.waiting import wait_until
from tuner.cli.main import main
from tuner.online.agent import _tune, watched
from tuner.online.command import tuning_lines
from tuner.online.live import REFUSALS, LiveTuning, Training
from tuner.online.request import Ended, TuningOutcome, TuningRequest
from tuner.online.response import Balance
from tuner.online.settings import clock_settings
from tuner.online.windows import Mark, Marks
from tuner.problem.constraints import Constraints
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knob_declarations import parse_knob
from tuner.workload.hook.online_marks import ADDRESS, Watch
from tuner.workload.node.clocks.base import (
    AppliedSettings,
    GovernorError,
    SetByOthers,
    UnsupportedKnob,
)
from tuner.workload.node.meters import MeterError, Reading
from tuner.workload.node.rank_server import control_socket

TRAIN = Path(__file__).with_name("train.py")
ROOT = Path(__file__).resolve().parents[2]
#: A command that trains one step.
COMMAND = ("--", "python", str(TRAIN), "1", "0")
TORCHRUN = Path(sys.executable).with_name("torchrun")
DEEPSPEED_PIPELINE = """
import deepspeed, torch
from deepspeed.pipe import PipelineModule

deepspeed.init_distributed()
layers = [torch.nn.Linear(8, 8) for _ in range(4)]
net = PipelineModule(layers=layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 8))
adam = {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}}
config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "optimizer": adam}
engine, *_ = deepspeed.initialize(
    model=net, model_parameters=list(net.parameters()), training_data=data, config=config
)
for _ in range(12):
    engine.train_batch()
"""


class Devices:
    """Governor and meter of a GPU whose power follows its clock; the test moves its time."""

    why_not, can_set = "", True
    supported_clocks_MHz = (700, 900, 1100, 1300, 1400)
    limit_range_W = (0.0, 0.0)
    resolution_s = 0.1

    def __init__(self) -> None:
        self.clock_MHz, self.time_s, self.energy_J = 1400, 0.0, 0.0
        self.refuses = self.ignores = self.blind = False
        self.unsupported: tuple[str, ...] = ()
        self.log: list[int] = []

    def apply(self, live: Settings, *, ranks: int | None = None) -> AppliedSettings:
        for knob in self.unsupported:
            if knob in live:
                raise UnsupportedKnob(knob, "the GPU takes none")
        if self.refuses:
            raise GovernorError("the GPUs did not take it")
        clock_MHz = live.get("clock_MHz", 1400)
        assert isinstance(clock_MHz, int)
        self.log.append(clock_MHz)
        if not self.ignores:
            self.clock_MHz = clock_MHz
        return AppliedSettings(live)

    def delivered(self) -> dict[str, float]:
        return {"clock_MHz": float(self.clock_MHz)}

    def foreign(self) -> tuple[str, ...]:
        return ()

    def restore(self) -> None:
        self.clock_MHz = 1400

    def close(self) -> None:
        self.restore()

    def read(self) -> Reading:
        if self.blind:
            raise MeterError("NVML: GPU is lost")
        return Reading(self.time_s, self.energy_J)

    def step(self) -> float:
        share = self.clock_MHz / 1400
        seconds = 0.5 * (0.8 + 0.2 / share)
        self.time_s += seconds
        self.energy_J += seconds * (80 + 300 * share**2.4)
        return self.time_s


class NoMarks:
    """Ranks that register no live knob and state no length."""

    present: Mapping[str, Any] = {}
    length = None

    def set_live(self, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return []


def live_tuning(
    devices: Any,
    said: list[str] | None = None,
    request: TuningRequest | None = None,
    *,
    offer: tuple[float, Sequence[Settings]] | None = None,
    marks: Any = None,
    **more: Any,
) -> LiveTuning:
    """Tuning of a training on made-up devices; `offer` is of its clocks if it is not given."""
    words = said if said is not None else []
    training = Training(
        request or TuningRequest(), devices, marks or NoMarks(), words.append, **more
    )
    return LiveTuning(training, devices, *(offer or (1400, clock_settings(devices))))


def train(live: LiveTuning, devices: Devices, steps: int = 2000, blind_at: int = 10**9) -> None:
    for number in range(steps):
        devices.blind = number > blind_at
        live.take(Mark(0, number, devices.step()))


def test_clocks_are_lowered_and_what_was_saved_is_true() -> None:
    devices = Devices()
    live = live_tuning(devices)
    for number in range(3000):
        live.take(Mark(0, number, devices.step()))
        live.take(Mark(1, number, devices.time_s + 100.0))  # another rank's marks are not mixed in
    time_s, energy_J = devices.time_s, devices.energy_J
    slowdown = time_s / (3000 * 0.5) - 1
    assert 0.01 < slowdown <= 0.05
    low, _, high = live.tuner.balance.slowdown
    assert low - 0.002 <= slowdown <= high + 0.002
    saved = 3000 * 0.5 * 380 - energy_J
    assert live.tuner.balance.saved_J[1] == pytest.approx(saved, rel=0.15)
    assert sum(live.seconds_at) == pytest.approx(time_s, rel=0.01)


def test_marks_that_are_lost_or_doubled_spoil_no_window() -> None:
    devices = Devices()
    live = live_tuning(devices)
    for number in range(2000):
        when_s = devices.step()
        if number % 7:
            live.take(Mark(0, number, when_s))
        if number % 11 == 0:
            live.take(Mark(0, number, when_s))
    assert live.tuner.changes == []
    assert devices.time_s / (2000 * 0.5) - 1 <= 0.05


def test_devices_that_refuse_end_the_tuning_with_the_reason() -> None:
    devices, said = Devices(), list[str]()
    live = live_tuning(devices, said)
    devices.refuses = True
    with pytest.raises(GovernorError, match="did not take it"):
        train(live, devices)
    assert devices.clock_MHz == 1400
    assert len(said) == REFUSALS


#: What is said of a GPU that takes neither of its knobs, once each.
NO_CLOCK = "clock_MHz cannot be set: the GPU takes none; "
NO_LIMIT = "power_limit_W cannot be set: the GPU takes none; "
OWN = "what the script registers is tried instead"


@pytest.mark.parametrize(
    ("unsupported", "knob", "registered", "said", "ended", "tried"),
    [
        (("clock_MHz",), "", {}, [f"{NO_CLOCK}power_limit_W is tried instead"], "", "300W"),
        (
            ("clock_MHz", "power_limit_W"),
            "live:nap=1,2",
            {"nap": 1},
            [f"{NO_CLOCK}power_limit_W is tried instead", f"{NO_LIMIT}{OWN}"],
            "",
            "nap=2",
        ),
        # Of a script that registers none of its knobs, and one whose value is the only one.
        (
            ("clock_MHz", "power_limit_W"),
            "live:nap=1,2",
            {},
            [
                "the script registers no live knob 'nap' in its first step",
                f"{NO_CLOCK}power_limit_W is tried instead",
            ],
            "refused",
            "",
        ),
        (
            ("clock_MHz", "power_limit_W"),
            "live:nap=1",
            {"nap": 1},
            [f"{NO_CLOCK}power_limit_W is tried instead"],
            "refused",
            "",
        ),
    ],
)
def test_what_no_device_takes_is_asked_once_and_the_next_is_tried(
    unsupported: tuple[str, ...],
    knob: str,
    registered: dict[str, Any],
    said: list[str],
    ended: str,
    tried: str,
) -> None:
    devices, heard, marks = Devices(), list[str](), NoMarks()
    devices.unsupported, marks.present = unsupported, registered
    marks.set_live = lambda values: [{}]  # type: ignore[method-assign]
    knobs = (parse_knob(knob),) if knob else ()
    request = TuningRequest(Constraints(max_slowdown=0.2), knobs=knobs)
    training = Training(request, devices, marks, heard.append)  # type: ignore[arg-type]
    limits = [Settings(), Settings(power_limit_W=300)]
    offered = [(1400.0, clock_settings(devices)), (350.0, limits)]
    offered += [(1.0, [Settings()])] if knob else []

    def follow(live: LiveTuning) -> tuple[Ended, str]:
        try:
            train(live, devices)
        except (GovernorError, InputError) as error:
            return "refused", str(error)
        return "", ""

    live, why, problem = _tune(training, devices, offered, follow)
    assert (why, heard) == (ended, said)
    seconds = dict(zip(live.facts()["settings"], live.seconds_at, strict=True))
    assert seconds[tried] > 0
    if ended:
        assert problem == "power_limit_W cannot be set: the GPU takes none"


def test_stages_of_devices_that_take_no_clock_are_said_once() -> None:
    devices, said = Devices(), list[str]()
    devices.unsupported = ("clock_MHz",)
    live = live_tuning(devices, said)

    def train_stages() -> None:
        for step in range(200):
            for rank, busy_s in enumerate((0.4, 0.2)):
                live.take(Mark(rank, step, devices.step(), busy_s=busy_s))

    with pytest.raises(GovernorError, match="takes none"):
        train_stages()
    assert (live.has_given_up, said) == (True, [])


@pytest.mark.parametrize(("knob", "count"), [("live:nap=1", 2), ("live:nap=1,2", 3)])
def test_knobs_alone_are_a_choice_before_the_script_registers_them(knob: str, count: int) -> None:
    request = TuningRequest(knobs=(parse_knob(knob),))
    live = live_tuning(Devices(), request=request, offer=(1.0, [Settings()]))
    assert len(live.settings) == count


@pytest.mark.parametrize("bound", [False, True])
def test_a_setting_that_another_process_changes_is_told_and_not_measured(bound: bool) -> None:
    devices, said = Devices(), list[str]()
    live = live_tuning(devices, said)
    apply = devices.apply
    change = ["the power limit of GPU 0 is 250 W: another process has set it"]

    def bounded(live: Settings, *, ranks: int | None = None) -> AppliedSettings:
        if bound and devices.time_s > 200 and live.get("clock_MHz", 0) == 1300:
            raise SetByOthers("above what another process has set")
        return apply(live, ranks=ranks)

    def foreign() -> tuple[str, ...]:
        return (change.pop(),) if change and devices.time_s > 200 and live._in_force else ()

    devices.apply = bounded  # type: ignore[method-assign]
    devices.foreign = foreign  # type: ignore[method-assign]
    train(live, devices)
    assert said[0].startswith("the power limit of GPU 0 is 250 W")
    assert live.refused == []  # nothing is wrong with the devices
    assert live.tuner.balance.saved_J[1] > 0  # the others go on
    assert devices.time_s / (2000 * 0.5) - 1 <= 0.05


def test_a_clock_that_reads_back_as_another_is_not_tried_again() -> None:
    devices, said = Devices(), list[str]()
    live = live_tuning(devices, said)
    devices.ignores = True
    with pytest.raises(GovernorError, match="refused"):
        train(live, devices)
    assert "reads back as 1400 MHz" in said[0]
    assert len(set(devices.log) - {1400}) == len(devices.log)


def test_a_clock_that_cannot_be_read_back_is_one_sentence_and_it_goes_on() -> None:
    devices, said = Devices(), list[str]()
    devices.delivered = dict  # type: ignore[method-assign]
    live = live_tuning(devices, said)
    train(live, devices)
    assert said == [
        "the clock cannot be read back, so that a setting that is not in force goes unnoticed"
    ]
    assert live.tuner.balance.saved_J[1] > 0
    assert devices.time_s / (2000 * 0.5) - 1 <= 0.05


@pytest.mark.parametrize("max_slowdown", [0.0, 0.001])
def test_a_promise_that_any_lower_clock_breaks_is_kept_at_the_highest(max_slowdown: float) -> None:
    devices, said = Devices(), list[str]()
    live = live_tuning(devices, said, TuningRequest(Constraints(max_slowdown=max_slowdown)))
    train(live, devices)
    assert devices.time_s / (2000 * 0.5) - 1 <= max_slowdown
    assert said == []


def test_a_meter_that_fails_is_the_callers_to_handle() -> None:
    devices = Devices()
    live = live_tuning(devices)
    with pytest.raises(MeterError):
        train(live, devices, blind_at=300)


def received(marks: Marks, count: int) -> list[Mark]:
    """Wait for a number of marks; return all that have arrived."""
    found: list[Mark] = []
    wait_until(lambda: found.extend(marks.wait(0.3)) or len(found) >= count, said=found)
    return found


@pytest.fixture
def heard() -> Iterator[tuple[Marks, str]]:
    """Marks, and the address where they are received."""
    listener, address, remove = control_socket()
    marks = Marks(listener)
    yield marks, address
    marks.close()
    listener.close()
    remove()


def test_what_a_program_writes_to_the_socket_itself_is_no_mark(heard: tuple[Marks, str]) -> None:
    marks, address = heard
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(address)
        link.sendall(b"step 1 2.0\nhello x\nstep\n\nhello 3 1\nstep 4 5.5\nstep a b\nst")
        assert received(marks, 1) == [Mark(3, 4, 5.5)]
        link.sendall(b"ep 5 6.5\n")
        assert received(marks, 1) == [Mark(3, 5, 6.5)]


def test_a_rank_without_an_agent_goes_on(tmp_path: Path) -> None:
    watch = Watch(str(tmp_path / "nobody"), 0)
    for _ in range(3):
        watch.step_done()
    assert watch.steps == 3


def test_an_agent_that_does_not_read_delays_no_step(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    watch = Watch(str(tmp_path / "s"), 0)
    began_s = time.monotonic()
    for _ in range(5000):  # more than the socket holds
        watch.step_done()
    # A send that waited a millisecond for room would take 5 s; a busy machine takes some 2 s.
    assert time.monotonic() - began_s < 4.5
    listener.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "there is no script"),
        (["srun", "-N", "4", "python", str(TRAIN)], "4 nodes"),
        (["mpirun", "-n", "2", "python", str(TRAIN)], "mpirun"),
    ],
)
def test_commands_that_cannot_be_watched_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        watched(words, ROOT)


@pytest.mark.parametrize(
    "words",
    [
        ["--tune"],
        ["study", "--tune", "--", "train.py"],
        ["--tune", "--steps", "3", "--", "train.py"],
        ["--tune", "--max-slowdown", "500%", "--", str(TRAIN), "1", "0"],
        ["--max-slowdown", "5%", "study"],
        ["--transfer", "tuned-1", "study"],
        ["--tune", "--transfer", "nowhere", "--", str(TRAIN), "1", "0"],
        ["study", "--tune", "--transfer", "nowhere", "--", str(TRAIN), "1", "0"],
        ["nowhere", "--tune", "--", str(TRAIN), "1", "0"],
        ["--tune", "--deadline", "2h", "--max-slowdown", "5%", *COMMAND],
        ["--tune", "--budget", "2kWh", "--power-cap", "300W", *COMMAND],
        ["--tune", "--deadline=-3s", *COMMAND],
        ["--tune", "--deadline", "2h", "--steps", "0", *COMMAND],
        ["--tune", "--steps", "3", *COMMAND],
        ["--follow-power", __file__, "--deadline", "2h", *COMMAND],
        ["--follow-power", "/nowhere", *COMMAND],
        ["--tune", "--follow-power", "x", *COMMAND],
        ["--deadline", "2h", *COMMAND],
    ],
)
def test_wrong_options_are_one_sentence(
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", *words]) == 2
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_an_outcome_without_a_step_is_worded() -> None:
    assert "before its steps" in tuning_lines(TuningOutcome(0, 0.05))[0]
    for saved_J, said in (
        ((10.0, 25.0, 40.0), ": 20.0 % less [9.1, 28.6] % than at the highest"),
        ((-40.0, -25.0, 10.0), ": 33.3 % more [-9.1, 66.7] % than at the highest"),
        ((0.0, 0.0, 0.0), ": as much as at the highest"),
    ):
        balance = Balance(seconds=9.0, energy_J=100.0, saved_J=saved_J)
        assert said in tuning_lines(TuningOutcome(30, 0.05, balance=balance))[0]
    lines = tuning_lines(TuningOutcome(3, 0.05, ended="fixed", problem="no right"))
    assert lines == [
        "Not tuned, because no clock can be set here: no right.",
        "The command ended with exit code 3.",
    ]


def test_where_no_lower_setting_was_tried_nothing_is_offered_to_the_next_run() -> None:
    took, record = Balance(9.0, 100.0), Path("runs/tuned-1")
    outcome = TuningOutcome(0, 0.1, ("", ""), None, 9, (9.0, 0.0), balance=took, record=record)
    lines = tuning_lines(outcome)
    assert lines[-1] == "No lower setting was tried: 9 s left no time for one by the promise."
    learned = tuning_lines(replace(outcome, seconds_at=(5.0, 4.0)))
    assert learned[-1] == "To begin the next run with this: --transfer runs/tuned-1"


# ---- real trainings


def run(words: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=400)


def tuner_run(*words: str) -> list[str]:
    return [sys.executable, "-m", "tuner.cli.main", "run", "--tune", *words]


@pytest.mark.real
@pytest.mark.slow
def test_without_a_meter_the_training_goes_on_untouched() -> None:
    env = {"CUDA_VISIBLE_DEVICES": ""}
    plain = run([sys.executable, str(TRAIN), "5", "0"], env)
    tuned = run(tuner_run("--", "python", str(TRAIN), "5", "0"), env)
    assert tuned.returncode == 0, tuned.stderr
    assert tuned.stdout.startswith(plain.stdout)
    if "only estimated" in tuned.stdout:  # no RAPL here
        assert "the training goes on" in tuned.stderr
    failed = run(tuner_run("--json", "--", "python", str(TRAIN), "x", "0"), env)
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["exit_code"] == 1


@pytest.fixture
def gpus(twin_node: Callable[..., TwinNode]) -> Any:
    gpu = replace(CORE_GPU, clock_free_share=0.6)
    return twin_node(gpu, gpu, virtual_time=False)


@pytest.mark.needs("cc")
@pytest.mark.real
@pytest.mark.quiet
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_tuned_training_has_the_losses_of_an_untuned_one_and_clocks_go_back(gpus: Any) -> None:
    launch = [str(TORCHRUN), "--nproc-per-node", "2", str(TRAIN), "600", "0"]
    plain = run(launch)
    tuned = run(tuner_run("--max-slowdown", "8%", "--json", "--", *launch), gpus.environment())
    assert tuned.returncode == 0, tuned.stderr
    losses = [line for line in tuned.stderr.splitlines() if line[:1].isdigit()]
    assert losses == plain.stdout.splitlines()
    outcome = json.loads(tuned.stdout)
    assert outcome["ended"] == ""
    assert outcome["meter"]["twin"]
    assert outcome["steps"] >= 580
    assert outcome["kept"]
    assert sum(outcome["seconds_at"][1:]) > 10
    assert outcome["balance"]["saved_J"][0] > 0
    assert [gpus.locked_MHz(each) for each in range(2)] == [None, None]
    # The law of the twin: time by the clock, and the clocks that were set.
    clocks = [1410, *(int(name.removesuffix("MHz")) for name in outcome["settings"][1:])]
    slow = [gpus.device_s(clock) / gpus.device_s(1410) for clock in clocks]
    lost_s = sum(s * (1 - 1 / f) for s, f in zip(outcome["seconds_at"], slow, strict=True))
    low, _, high = outcome["balance"]["lost_s"]
    assert low - 0.5 <= lost_s <= high + 0.5


@pytest.mark.needs("cc")
@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_training_goes_on_at_its_own_clocks_if_the_agent_is_killed(
    gpus: Any, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    environ = {**os.environ, **gpus.environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launch = [str(TORCHRUN), "--nproc-per-node", "2", str(TRAIN), "700", "0.005"]
    with output.open("w") as file:
        agent = subprocess.Popen(tuner_run("--", *launch), env=environ, stdout=file)
    wait_until(lambda: gpus.locked_MHz(0), 120, output)
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    wait_until(lambda: not any(gpus.locked_MHz(each) for each in range(2)))
    wait_until(lambda: "\n699 " in output.read_text(), 120, output)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_for_tuner_alone_is_the_training_s(number: signal.Signals, tmp_path: Path) -> None:
    """A container's stop or a scheduler's warning reaches tuner, which tunes nothing here."""
    script = tmp_path / "job.py"
    script.write_text(
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(43))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    words = tuner_run("--runs-dir", str(tmp_path), "--", "python", str(script))
    started = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)
    with started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        started.send_signal(number)
        started.stdout.read()
    assert started.returncode == 43


def test_the_address_is_not_passed_on_to_what_the_training_starts() -> None:
    code = (
        f"import os; os.environ[{ADDRESS!r}] = 'nowhere'; "
        "from tuner.workload.hook.online_marks import watch_program; watch_program(); "
        f"assert {ADDRESS!r} not in os.environ"
    )
    assert run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (["watch", "s.py", "--a"], ["--a"]),
        (["--local_rank=1", "watch", "s.py", "--a"], ["--local_rank=1", "--a"]),
        (["--local_rank=1", "watch", "-m", "s", "watch"], ["--local_rank=1", "watch"]),
    ],
)
def test_the_script_gets_the_words_that_it_would_get_without_us(
    words: list[str], argv: list[str], tmp_path: Path
) -> None:
    (tmp_path / "s.py").write_text("import json, sys; print(json.dumps(sys.argv))")
    hook = ROOT / "workload" / "hook" / "__main__.py"
    done = subprocess.run(
        [sys.executable, str(hook), *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert json.loads(done.stdout)[1:] == argv, done.stderr


@pytest.mark.parametrize("more", [[], ["--lr", "1"]])
def test_a_script_trains_behind_the_hook_with_and_without_arguments(
    tmp_path: Path, more: list[str]
) -> None:
    (tmp_path / "train.py").write_text("import sys; print('trained', *sys.argv[1:])")
    words, assigned = watched(["python", "train.py", *more], tmp_path)
    done = subprocess.run(
        words, cwd=tmp_path, env=os.environ | assigned, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["trained", *more]), done.stderr


@pytest.mark.needs("cc")
@pytest.mark.real
@pytest.mark.quiet
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_hot_gpu_is_named_with_the_evidence(gpus: Any) -> None:
    gpus.set(1, heat_MHz=900)
    launch = [str(TORCHRUN), "--nproc-per-node", "2", str(TRAIN), "600", "0"]
    done = run(tuner_run("--max-slowdown", "0%", "--json", "--", *launch), gpus.environment())
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    (named,) = outcome["stragglers"]
    assert (named["state"]["device"], named["cause"]) == (1, "heat")
    assert named["value"] <= 900
    assert named["usual"] > 1.2 * named["value"]
    assert named["cost"] > 0.03
    assert "MHz where the others run" in done.stderr
    assert [state["rank"] for state in outcome["ranks"]] == [0, 1]


def test_a_mark_before_the_wait_ends_no_step(heard: tuple[Marks, str]) -> None:
    marks, address = heard
    watch = Watch(address, 2)
    watch.ready()
    watch.step_done()
    found = received(marks, 2)
    assert [(mark.rank, mark.step, mark.ready) for mark in found] == [(2, 1, True), (2, 1, False)]
    assert marks.pids == {2: os.getpid()}


def test_a_watched_model_is_still_copied_and_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook on a parameter's gradient is no part of the model."""
    code = (
        "import copy, io, torch\n"
        "from tuner.workload.hook import state, watching\n"
        "class Link:\n"
        "    told = 0\n"
        "    def ready(self): self.told += 1\n"
        "state.link = Link()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "watching.watch_ready(model.parameters())\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "copy.deepcopy(model)(torch.ones(1, 2)).sum().backward()\n"
        "torch.save(model, io.BytesIO())\n"
        "assert state.link.told == 1, state.link.told\n"
    )
    done = run([sys.executable, "-c", code], {"WORLD_SIZE": "2"})
    assert done.returncode == 0, done.stderr


@pytest.mark.real
@pytest.mark.slow
def test_a_watched_deepspeed_engine_trains_and_its_steps_are_sent(
    tmp_path: Path, heard: tuple[Marks, str]
) -> None:
    code = (
        "import torch, deepspeed\n"
        "model = torch.nn.Linear(4, 1)\n"
        "adam = {'type': 'Adam', 'params': {'torch_adam': True}}\n"
        "config = {'train_batch_size': 4, 'optimizer': adam}\n"
        "engine, *_ = deepspeed.initialize(\n"
        "    model=model, model_parameters=model.parameters(), config=config)\n"
        "for _ in range(3):\n"
        "    engine.backward(engine(torch.randn(4, 4)).sum())\n"
        "    engine.step()\n"
    )
    (tmp_path / "train.py").write_text(code)
    marks, address = heard
    words, _ = watched(["python", "train.py"], tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {ADDRESS: address, "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": port, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    done = run([words[0], words[1], "watch", str(tmp_path / "train.py")], env)
    assert done.returncode == 0, done.stderr
    assert [mark.step for mark in received(marks, 3)] == [1, 2, 3]


@pytest.mark.needs("cc")
@pytest.mark.real
@pytest.mark.quiet
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_stage_with_slack_runs_slower_and_the_step_takes_as_long(
    twin_node: Callable[..., TwinNode],
) -> None:
    gpu = replace(CORE_GPU, step_s=0.0, micro_batch_s=0.0, sample_s=0.0)
    node: Any = twin_node(gpu, gpu, virtual_time=False)
    node.set(load=0.8)
    program = str(TRAIN.with_name("train_pipeline.py"))
    launch = [str(TORCHRUN), "--nproc-per-node", "2", program, "1300", "0.02", "0.012"]
    plain = run(launch)
    environ = {**node.environment(), "TIMED": "1"}
    tuned = run(tuner_run("--max-slowdown", "8%", "--json", "--", *launch), environ)
    assert tuned.returncode == 0, tuned.stderr
    losses = [line for line in tuned.stderr.splitlines() if line[:1].isdigit()]
    assert losses == plain.stdout.splitlines()
    assert "of the slowest's time; so are their clocks set" in tuned.stderr
    outcome = json.loads(tuned.stdout)
    assert (outcome["ended"], outcome["kept"]) == ("", True), tuned.stderr
    staged = outcome["settings"].index("1410,910MHz")
    slowdown, power = outcome["relative"][staged]
    # Of four micro-batches the first fills the pipeline, which takes longer.
    assert slowdown == pytest.approx((4 * 20 + 12 * 1410 / 910) / (4 * 20 + 12), abs=0.02)
    assert power < 0.85
    assert sum(outcome["seconds_at"][1:]) > 20
    assert outcome["balance"]["saved_J"][0] > 0
    assert [node.locked_MHz(each) for each in range(2)] == [None, None]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("program", ["torch", pytest.param("deepspeed", marks=pytest.mark.long)])
def test_the_work_of_each_stage_is_timed_in_the_first_steps(
    program: str, tmp_path: Path, heard: tuple[Marks, str]
) -> None:
    script = [str(TRAIN.with_name("train_pipeline.py")), "12", "0", "0"]
    if program == "deepspeed":
        (tmp_path / "train.py").write_text(DEEPSPEED_PIPELINE)
        script = [str(tmp_path / "train.py")]
    words, _ = watched([str(TORCHRUN), "--nproc-per-node", "2", *script], tmp_path)
    marks, address = heard
    environ = {**os.environ, "OMP_NUM_THREADS": "1", ADDRESS: address}
    job = subprocess.Popen(words, env=environ, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        assert job.wait() == 0
    finally:
        job.kill()
    found: list[Mark] = []

    def steps_of(rank: int) -> list[Mark]:
        return [mark for mark in found if mark.rank == rank and not mark.ready]

    def all_heard() -> bool:
        found.extend(marks.wait(0.2))
        return min(len(steps_of(0)), len(steps_of(1))) >= 12

    wait_until(all_heard)
    for rank in range(2):
        steps = steps_of(rank)
        assert len(steps) == 12
        assert all(0 < mark.busy_s < 5 for mark in steps[:5])
        assert all(mark.busy_s == 0 for mark in steps[5:])
