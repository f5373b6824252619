"""Declared live knobs of a tuned training: set by all ranks after one step, and chosen safely."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.online.test_agent import TORCHRUN, Devices, NoMarks, gpus, live_tuning, run, tuner_run
from tests.online.test_bandit import X, gpu, train
from tests.waiting import wait_until
from tuner.cli.main import main
from tuner.online import windows as marks_module
from tuner.online.bandit import OnlineTuner
from tuner.online.live import CHUNK_S
from tuner.online.request import TuningRequest
from tuner.online.settings import with_declared
from tuner.online.windows import Chunk, Mark, Marks
from tuner.problem.constraints import Constraints
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knob_declarations import Knob, parse_knob
from tuner.workload.hook import state
from tuner.workload.hook.online_marks import Watch
from tuner.workload.node.clocks.base import KnobRefused

__all__ = ["gpus"]
TRAIN = Path(__file__).with_name("train_live.py")
WORKERS = parse_knob("live:workers=0,2,4")

# ---- the ranks


class Ranks:
    """Ranks that step in threads of their own, and the marks that they send."""

    def __init__(self, path: Path, count: int, ahead: int = 0) -> None:
        self.changes: list[tuple[str, int, object]] = []
        state.live("workers", self._set, lambda: 0)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        self.marks, self.ended = Marks(listener), threading.Event()
        self.watches = [Watch(str(path), rank) for rank in range(count)]
        self.watches[-1].steps = ahead
        self.threads = [
            threading.Thread(target=self._train, args=(each,), name=str(rank))
            for rank, each in enumerate(self.watches)
        ]
        for thread in self.threads:
            thread.start()
        heard = self.marks  # of each rank, its knobs and a step
        wait_until(lambda: len(heard.pids) == count and heard.present and heard.wait(0.1))

    def _set(self, value: object) -> None:
        name = threading.current_thread().name
        self.changes.append((name, self.watches[int(name)].steps, value))

    def _train(self, watch: Watch) -> None:
        while not self.ended.wait(0.02):  # 32 steps ahead of the latest are time enough to stop
            watch.step_done()

    def close(self) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()
        self.marks.close()
        state.forget_live()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(count: int, ahead: int = 0) -> Ranks:
        made.append(Ranks(tmp_path / "s", count, ahead))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_all_ranks_change_after_the_same_step_and_say_what_they_read(
    ranks: Callable[..., Ranks],
) -> None:
    training = ranks(3)
    for value in (2, 4):
        assert training.marks.set_live({"workers": value}) == 3 * [{"read": {"workers": 0}}]
    steps = [{step for _, step, given in training.changes if given == value} for value in (2, 4)]
    assert [len(each) for each in steps] == [1, 1]
    assert len(training.changes) == 6


def test_a_rank_whose_host_is_ahead_is_waited_for_further_on(ranks: Callable[..., Ranks]) -> None:
    training = ranks(2, ahead=6)
    training.marks.set_live({"workers": 2})
    ((_, a, _), (_, b, _)) = training.changes
    assert a == b


def test_a_rank_that_ends_or_hangs_sets_nothing_and_holds_no_other(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks_module, "REPLY_S", 0.5)
    training = ranks(2)
    training.watches[1].step_done = lambda: None  # type: ignore[method-assign]
    with pytest.raises(KnobRefused, match="did not stop"):
        training.marks.set_live({"workers": 2})
    assert training.changes == []
    before = training.watches[0].steps
    wait_until(lambda: training.watches[0].steps > before)


def test_a_value_that_the_program_refuses_is_told(ranks: Callable[..., Ranks]) -> None:
    training = ranks(1)
    (told,) = training.marks.set_live({"unknown": 1})
    assert "not registered" in told["refused"]


# ---- the choice


def world(effects: dict[object, tuple[float, float]]) -> Any:
    """A GPU whose knob multiplies step time and power by its value's effect, at any clock."""
    return lambda setting, step: tuple(
        figure * factor
        for figure, factor in zip(gpu(setting % 7), effects[setting // 7], strict=True)
    )


def tuner_of(values: int, max_slowdown: float = 0.05) -> OnlineTuner:
    return OnlineTuner(
        [*X] * values,
        max_slowdown=max_slowdown,
        window_s=8,
        settle_s=2,
        declared=[(value,) for value in range(values) for _ in X],
    )


@pytest.mark.parametrize("seeds", [1, pytest.param(5, marks=pytest.mark.long)])
def test_a_value_that_saves_is_found_and_one_that_slows_is_left(seeds: int) -> None:
    effects: dict[object, tuple[float, float]] = {0: (1.0, 1.0), 1: (3.0, 0.5), 2: (0.9, 1.0)}
    for seed in range(seeds):
        done = train(tuner_of(3), world(effects), seed=seed, steps=12_000)
        assert done.visits[-1] // 7 == 2
        plain = OnlineTuner(X, max_slowdown=0.05, window_s=8, settle_s=2)
        assert done.saved > train(plain, gpu, seed=seed, steps=12_000).saved + 0.05


#: Cases that CI runs; the extremes of each column are among them.
SOME = [(1.02, 0.3, 0.05, 1.0), (2.0, 1.0, 0.2, 0.5), (10.0, 1.5, 0.01, 2.0)]
ALL = [
    (slower, power, *promise)
    for slower in (1.02, 1.1, 2.0, 5.0, 10.0)
    for power in (0.3, 1.0, 1.5)
    for promise in ((0.01, 2.0), (0.05, 1.0), (0.2, 0.5))
]


@pytest.mark.parametrize(
    ("slower", "power", "max_slowdown", "hours"),
    [
        pytest.param(*each, marks=pytest.mark.slow if each in SOME else pytest.mark.long)
        for each in ALL
    ],
)
def test_no_value_breaks_the_promise_at_any_step(
    slower: float, power: float, max_slowdown: float, hours: float
) -> None:
    law = world({0: (1.0, 1.0), 1: (slower, power)})
    tuner, random = tuner_of(2, max_slowdown), np.random.default_rng(7)
    setting, seconds, top_s, worst, tried = 0, 0.0, 0.0, 0.0, False
    while seconds < 3600 * hours:
        (time_s, power_W), kick = law(setting, 0), math.exp(random.normal(0, 0.01))
        steps = max(1, math.ceil(CHUNK_S / time_s))
        chunk = Chunk(steps, steps * time_s * kick, steps * time_s * kick * power_W)
        tried = tried or setting >= 7
        seconds, top_s = seconds + chunk.seconds, top_s + steps * gpu(0)[0] * kick
        worst = max(worst, seconds / top_s - 1)
        setting = tuner.add(chunk).setting
    assert tried
    assert worst <= max_slowdown


def test_one_new_value_is_tried_at_a_time() -> None:
    seen: set[tuple[object, ...]] = set()
    declared = [(a, b) for a in range(3) for b in range(3) for _ in X]
    tuner = OnlineTuner([*X] * 9, max_slowdown=0.2, window_s=8, settle_s=2, declared=declared)
    for setting in train(tuner, lambda at, step: gpu(at % 7), steps=8000).visits:
        now = declared[setting]
        new = [i for i in (0, 1) if all(now[i] != other[i] for other in seen)]
        assert len(new) <= (1 if seen else 2)
        seen.add(now)
    assert len(seen) > 3


def test_a_value_that_is_refused_is_tried_at_no_other_clock_and_ends_nothing() -> None:
    devices, said = Devices(), list[str]()
    refused: list[object] = []

    def set_live(values: dict[str, Any]) -> list[dict[str, Any]]:
        if (value := values["governor"]) == "a":
            return [{}]
        refused.append(value)
        return [{"refused": f"the script refused {value}"}]

    marks = NoMarks()
    marks.present, marks.set_live = {"governor": "a"}, set_live  # type: ignore[attr-defined]
    governor = Knob("governor", tuple("abcde"), live=True, baseline="a")
    request = TuningRequest(Constraints(max_slowdown=0.2), knobs=(governor,))
    live = live_tuning(devices, said, request, marks=marks)
    for number in range(6000):
        live.take(Mark(0, number, devices.step()))
    assert sorted(map(str, refused)) == ["b", "c", "d", "e"]
    assert len(said) == 4
    assert devices.clock_MHz < 1400


def test_a_knob_that_the_script_does_not_register_is_one_sentence(
    ranks: Callable[..., Ranks],
) -> None:
    devices, said = Devices(), list[str]()
    request = TuningRequest(knobs=(parse_knob("live:nap=1,2"), parse_knob("live:workers=0,2")))
    live = live_tuning(devices, said, request, marks=ranks(1).marks)
    for number in range(20):
        live.take(Mark(0, number, devices.step()))
    assert said == ["the script registers no live knob 'nap' in its first step"]
    assert live.settings[0] == Settings(workers=0)
    assert len(live.settings) == 10


def test_settings_name_todays_values_first() -> None:
    governor = Knob("governor", ("a", "b"), live=True, baseline="a")
    found = with_declared(
        [Settings(), Settings(clock_MHz=900)], [WORKERS, governor], {"workers": 2}
    )
    assert found[:2] == [
        Settings(workers=2, governor="a"),
        Settings(clock_MHz=900, workers=2, governor="a"),
    ]
    assert found[2:4] == [
        Settings(workers=2, governor="b"),
        Settings(clock_MHz=900, workers=2, governor="b"),
    ]
    assert len(found) == 12
    # What the program reads need not be one of the values; what it cannot read is the first.
    assert with_declared([Settings()], [WORKERS], {"workers": 3})[0] == Settings(workers=3)
    assert with_declared([Settings()], [WORKERS], {"workers": None})[0] == Settings(workers=0)


# ---- the command


@pytest.mark.parametrize(
    ("knobs", "limits", "said"),
    [
        (["compile=false,true"], {}, "needs a new launch"),
        (["live:a=1,2", "live:a=3,4"], {}, "a"),
        (["live:a=1,2,3,4,5", "live:b=1,2,3"], {}, "15 combinations"),
        (["live:a=1,2"], {"power_cap_W": 300.0}, "leave out --knob"),
    ],
)
def test_knobs_that_cannot_be_tuned_are_one_sentence(
    knobs: list[str], limits: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        TuningRequest(Constraints(**limits), knobs=tuple(map(parse_knob, knobs)))


def test_knobs_without_tune_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "study", "--knob", "live:a=1,2"]) == 2
    assert "for --tune" in capsys.readouterr().err


@pytest.mark.needs("cc")
@pytest.mark.real
@pytest.mark.quiet
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_real_training_is_faster_with_the_better_value_and_learns_the_same(gpus: Any) -> None:
    launch = [str(TORCHRUN), "--nproc-per-node", "2", str(TRAIN), "1500", "0.05", "0.01"]
    environ = gpus.environment()
    words = ["--knob", "live:nap=long,short,wrong", "--max-slowdown", "50%", "--json", "--"]
    tuned = run(tuner_run(*words, *launch), environ)
    assert tuned.returncode == 0, tuned.stderr
    outcome = json.loads(tuned.stdout)
    assert outcome["ended"] == "", outcome["problem"]
    assert outcome["kept"]
    seconds = dict(zip(outcome["settings"], outcome["seconds_at"], strict=True))
    short_s = sum(s for name, s in seconds.items() if "nap=short" in name)
    assert short_s > 0.3 * sum(seconds.values())
    times_s = dict(zip(outcome["settings"], (time for time, _ in outcome["relative"]), strict=True))
    for clock in ("1310MHz", "1110MHz"):
        assert times_s[f"{clock} nap=short"] < times_s[f"{clock} nap=long"] - 0.1
    assert "refused 'wrong'" in tuned.stderr
    changes = re.findall(r"rank (\d) sleeps (\w+) after step (\d+)", tuned.stderr)
    of_rank = [[(value, step) for who, value, step in changes if who == rank] for rank in "01"]
    assert of_rank[0] == of_rank[1]
    plain = run([*tuner_run("--", *launch)], {"CUDA_VISIBLE_DEVICES": ""})
    losses = [line for line in plain.stdout.splitlines() if line[:1].isdigit()]
    assert [line for line in tuned.stderr.splitlines() if line[:1].isdigit()] == losses
    assert math.isfinite(outcome["balance"]["energy_J"])
