"""One posterior of all windows: intervals that hold, learned spreads, savings that shrink."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.support.studies import METER, measured, record, request
from tuner.answer.posterior import Gain, LaunchPosterior, Windows
from tuner.answer.state import _peak_W, points_of
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.node.measure.statistics import Z90
from tuner.workload.records.probe import ProbeRecord, ProbeRequest

WINDOW_SD = 0.005


def launch(
    rng: np.random.Generator,
    number: int,
    size: int,
    spread: float,
    *,
    time: float = 0.0,
    lives: tuple[int, ...] = (1,),
    together: float = 0.0,
) -> ProbeRecord:
    """A launch of micro-batch `size` whose log time and log power differ from (time, 0)."""
    effect = rng.normal(0, spread, 2)
    effect[1] = together * effect[0] + math.sqrt(1 - together**2) * effect[1]
    windows = []
    for live in lives:
        noise = effect + rng.normal(0, WINDOW_SD, 2)
        seconds = math.exp(time + noise[0])
        window = measured(Settings(clock_MHz=live), time_s=seconds, power_W=20 * math.exp(noise[1]))
        error = WINDOW_SD * seconds
        windows.append(replace(window, step_time_se_s=error, power_se_W=WINDOW_SD * 20))
    request = ProbeRequest(f"p{number:04d}", Settings(data_parallel=2, micro_batch=size + 1))
    return ProbeRecord(request, tuple(windows), METER)


def posterior(records: list[ProbeRecord]) -> LaunchPosterior:
    return LaunchPosterior.of(Windows.of(records))


def configuration(size: int, live: int = 1) -> Configuration:
    return Configuration.of(data_parallel=2, micro_batch=size + 1, clock_MHz=live)


@pytest.mark.parametrize(("lives", "repeated"), [((1,), 4), ((1, 2, 3, 1), 4), ((1, 2, 3, 1), 0)])
def test_intervals_hold_the_truth(lives: tuple[int, ...], repeated: int) -> None:
    """The setting that a launch visits twice is no other launch."""
    rng = np.random.default_rng(7)
    held = []
    for _ in range(40):
        records = [launch(rng, i, i, 0.01, lives=lives) for i in range(6)]
        records += [launch(rng, 6 + i, i % 2, 0.01, lives=lives) for i in range(repeated)]
        found = posterior(records)
        held += list(np.abs(found.log_time) <= Z90 * found.errors[1])
    assert np.mean(held) >= 0.86


def test_the_spread_of_launches_is_learned() -> None:
    rng = np.random.default_rng(3)
    for spread in (0.01, 0.05):
        found = posterior([launch(rng, i, i % 4, spread) for i in range(24)])
        assert found.launch_sd(0.0, 1.0) == pytest.approx(spread, rel=0.7)


def test_exact_launches_count_as_such_and_launches_far_apart_do_not() -> None:
    """On a shared machine launches differ by 20 %: six of them have to tell so."""
    rng = np.random.default_rng(3)
    exact = posterior([launch(rng, i, i % 3, 0.0005) for i in range(9)])
    assert exact.launch_sd(0.0, 1.0) < 0.01
    shared = posterior([launch(rng, i, i % 3, 0.2) for i in range(6)])
    assert shared.launch_sd(0.0, 1.0) > 0.1


def test_exact_figures_are_shown_nearly_as_they_were_measured() -> None:
    """Ranks, micro-batch and clock do not add up, and what a launch visits twice agrees."""
    launches = [
        *((2, 2, (1410,)), (1, 1, (1410,)), (1, 4, (1410, 1400, 1110, 910, 810, 1210, 1410))),
        *((2, 2, (1110, 1210, 910, 810, 610, 1400, 1110)), (2, 1, (910,)), (2, 2, (1410,))),
        *((1, 2, (910,)), (2, 2, (1410,)), (1, 4, (610,))),
    ]
    truth: dict[Configuration, float] = {}
    records = []
    for number, (ranks, batch, clocks) in enumerate(launches):
        windows = []
        for clock in clocks:
            share = clock / 1410
            steps = 4 // (ranks * batch)
            time_s = (0.04 + steps * (0.02 + 0.03 * batch)) * (0.2 + 0.8 / share)
            busy_W = 60 + 280 * max(0.7, 0.4 + 0.6 * share) ** 2 * share
            window = measured(
                Settings(clock_MHz=clock), time_s=time_s, power_W=ranks * busy_W + (2 - ranks) * 60
            )
            errors = {"step_time_se_s": 3e-4 * time_s, "power_se_W": 3e-4 * window.power_W}
            windows.append(replace(window, **errors))
            tried = Configuration.of(data_parallel=ranks, micro_batch=batch, clock_MHz=clock)
            truth[tried] = math.log(time_s * window.power_W)
        launched = Settings(data_parallel=ranks, micro_batch=batch)
        request = ProbeRequest(f"p{number:04d}", launched)
        records.append(ProbeRecord(request, tuple(windows), METER))
    found = posterior(records)
    logs = dict(zip(found.configurations, found.log_time + found.log_power, strict=True))
    assert max(abs(logs[each] - log) for each, log in truth.items()) < 0.01


@pytest.mark.parametrize("seed", range(4))
def test_a_few_draws_of_a_large_spread_do_not_move_a_figure(seed: int) -> None:
    """The mean of all draws follows those few, and each launch that was made once was 5 % off."""
    rng = np.random.default_rng(seed)
    records, truth = [], {}
    for size in range(5):
        of_launch, windows = rng.normal(0, 0.1), []
        for live in (1, 2, 3):
            log = of_launch + 0.15 * live + rng.normal(0, 0.02)
            window = measured(Settings(clock_MHz=live), time_s=math.exp(log), power_W=20.0)
            errors = {"step_time_se_s": 3e-4 * math.exp(log), "power_se_W": 3e-4 * 20}
            windows.append(replace(window, **errors))
            truth[configuration(size, live)] = log
        request = ProbeRequest(f"p{size:04d}", Settings(data_parallel=2, micro_batch=size + 1))
        records.append(ProbeRecord(request, tuple(windows), METER))
    found = posterior(records)
    true = np.array([truth[each] for each in found.configurations])
    by_mean = found._time.weights @ found._time.means
    assert np.max(abs(found.log_time - true)) < 0.9 * np.max(abs(by_mean - true))


@pytest.mark.parametrize("spread", [0.0005, 0.003])
def test_a_launch_that_is_truly_better_and_was_made_once_stays_the_best(spread: float) -> None:
    """It is shrunk, as luck would be, within an interval that holds the truth."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        records = [launch(rng, i, i, spread, time=-0.03 * (i == 3)) for i in range(6)]
        records += [launch(rng, 6 + i, 0, spread) for i in range(2)]
        found = posterior(records)
        best, second = np.sort(found.log_time)[:2]
        assert found.log_time[3] == best < second - 0.004
        assert abs(found.log_time[3] + 0.03) <= Z90 * found.errors[1][3]


def test_launches_of_two_modes_are_held_by_their_intervals_and_few_are_sure() -> None:
    """Each launch is, by chance, 5 % slower or not: no normal distribution, and no saving."""
    held, sure = [], 0
    for seed in range(12):
        rng = np.random.default_rng(100 + seed)
        slow = rng.integers(0, 2, 12)
        records = [launch(rng, i, i if i < 8 else 0, 0.001, time=0.05 * slow[i]) for i in range(12)]
        found = posterior(records)
        held += list(abs(found.log_time - 0.025) <= Z90 * found.errors[1])
        for size in range(1, 8):
            pair = configuration(size), configuration(0)
            alone = found.by_launches(*pair, 0.0, 1.0)
            assert alone is not None
            by_luck = 7 * (1 - alone.above(0.005))
            sure += min(found.saving(*pair, 0.0, 1.0).above(0.005), 1 - by_luck) >= 0.95
    assert np.mean(held) >= 0.86
    assert sure <= 0.05 * 12 * 7


def test_the_median_of_a_mixture_is_not_its_mean() -> None:
    gain = Gain(np.array([0.1, 0.5]), np.array([0.01, 0.2]), np.array([0.8, 0.2]))
    assert gain.above(gain.median) == pytest.approx(0.5)
    assert gain.median < 0.11 < gain.mean


def test_second_visits_in_one_launch_say_nothing_of_launches() -> None:
    rng = np.random.default_rng(3)
    one = posterior([launch(rng, 0, 0, 0.0, lives=(1,))])
    visits = posterior([launch(rng, 0, 0, 0.0, lives=(1, 1, 1, 1))])
    assert visits.errors[1][0] == pytest.approx(one.errors[1][0], rel=0.3)
    assert visits.errors[1][0] > 0.01


def test_the_best_of_many_equal_ones_shrinks_towards_them() -> None:
    rng = np.random.default_rng(5)
    stated, raw = [], []
    for _ in range(25):
        records = [launch(rng, i, i, 0.02) for i in range(10)]
        records += [launch(rng, 10, 0, 0.02), launch(rng, 11, 0, 0.02)]
        found = posterior(records)
        best = min(range(1, 10), key=lambda i: records[i].measurements[0].step_time_s)
        gain = found.saving(configuration(best), configuration(0), 0.0, 1.0)
        times = [records[i].measurements[0].step_time_s for i in (0, 10, 11)]
        raw.append(np.mean(np.log(times)) - math.log(records[best].measurements[0].step_time_s))
        stated.append(gain.median)
        low, high = gain.interval(0.95)
        assert low < gain.median < high
    assert np.mean(stated) < 0.8 * np.mean(raw)


def test_a_large_saving_is_hardly_shrunk_and_almost_certain() -> None:
    rng = np.random.default_rng(5)
    records = [launch(rng, i, i, 0.01, time=math.log(0.27) * (i == 3)) for i in range(6)]
    records += [launch(rng, 6, 0, 0.01), launch(rng, 7, 0, 0.01)]
    found = posterior(records)
    pair = configuration(3), configuration(0)
    gain = found.saving(*pair, 1.0, 0.0)
    assert gain.mean == pytest.approx(-math.log(0.27), rel=0.05)
    assert gain.above(0.0) > 0.999
    alone = found.by_launches(*pair, 1.0, 0.0)
    assert alone.above(0.0) > 0.99


def test_many_settings_leave_out_no_launch() -> None:
    """The spreads are learned from cells of every launch, so the last one is not thought luck."""
    rng = np.random.default_rng(5)
    lives = tuple(range(1, 11))
    records = [
        launch(rng, i, i, 0.01, time=-1.3 if i == 29 else 0.05, lives=lives) for i in range(30)
    ]
    records += [launch(rng, 30 + i, 0, 0.01, time=0.05) for i in range(2)]
    gain = posterior(records).saving(configuration(29), configuration(0), 0.0, 1.0)
    assert gain.mean == pytest.approx(1.35, rel=0.05)


def test_only_named_launches_count() -> None:
    rng = np.random.default_rng(5)
    records = [launch(rng, 0, 0, 0.0), launch(rng, 1, 1, 0.0, time=-0.5)]
    records.append(launch(rng, 2, 1, 0.0, time=-0.1))
    found = posterior(records)
    pair = configuration(1), configuration(0)
    fresh = found.by_launches(*pair, 0.0, 1.0, only=frozenset({2}))
    assert fresh.mean == pytest.approx(0.1, abs=0.03)
    assert found.by_launches(*pair, 0.0, 1.0, only=frozenset()) is None
    assert found.launches_of(configuration(1)) == {1, 2}


def test_launches_tell_how_time_and_power_go_together() -> None:
    rng = np.random.default_rng(11)
    apart = posterior([launch(rng, i, i, 0.05) for i in range(10)])
    assert apart.correlation == 0.0
    found = posterior([launch(rng, i, i % 3, 0.05, together=-0.95) for i in range(18)])
    assert found.correlation < -0.5


def test_draws_have_the_moments_that_are_stated() -> None:
    rng = np.random.default_rng(2)
    records = [launch(rng, i, i % 3, 0.02, time=0.1 * (i % 3), lives=(1, 2)) for i in range(8)]
    found = posterior(records)
    time, power = found.draw(np.random.default_rng(0), 6000)
    assert time.mean(axis=0) == pytest.approx(found.log_time, abs=0.004)
    assert power.mean(axis=0) == pytest.approx(found.log_power, abs=0.004)
    inside = np.abs(time - found.log_time) <= Z90 * found.errors[1]
    assert inside.mean(axis=0) == pytest.approx(0.9, abs=0.04)
    # Settings of one launch share its effect.
    both = [found.configurations.index(configuration(0, live)) for live in (1, 2)]
    assert np.corrcoef(time[:, both[0]], time[:, both[1]])[0, 1] > 0.3


def test_a_gain_is_a_mixture() -> None:
    gain = Gain(np.array([0.0, 1.0]), np.array([0.1, 0.1]), np.array([0.25, 0.75]))
    assert gain.mean == pytest.approx(0.75)
    assert gain.above(0.5) == pytest.approx(0.75, abs=1e-3)
    assert gain.shifted(1.0).above(1.5) == pytest.approx(0.75, abs=1e-3)
    low, high = Gain.normal(0.0, 1.0).interval(0.95)
    assert (low, high) == pytest.approx((-1.96, 1.96), abs=0.001)


# ---- points of a posterior


def test_ninety_per_cent_intervals_hold_the_truth_under_launch_noise():
    """Windows claim 1 %, launches differ by 5 %: about 90 % of intervals hold the truth."""
    rng = np.random.default_rng(1)
    held = 0
    total = 0
    for trial in range(60):
        records = []
        for number in range(4):
            for repeat in range(3):
                seconds = math.exp(rng.normal(0, 0.05) + rng.normal(0, 0.01))
                name = f"p{trial}-{number}-{repeat}"
                asked = request(name)
                launch = type(asked.launch)({**asked.launch, "micro_batch": number + 1})
                changed = type(asked)(name, launch)
                records.append(
                    record(name, request=changed, measurements=(measured(time_s=seconds),))
                )
        for point in points_of(LaunchPosterior.of(Windows.of(records)), 1):
            low, high = point.time_interval_s
            held += low <= 1.0 <= high
            total += 1
    assert 0.85 <= held / total <= 0.97


def test_the_peak_is_the_highest_sample_within_the_window(tmp_path):
    """Samples before the window (a launch) are no part of it; without samples nothing is said."""
    from dataclasses import replace

    from tuner.workload.records.probe import PowerSample
    from tuner.workload.records.trace import write_power_samples

    window = replace(measured(), started_s=10.0, window_s=5.0)
    windows = Windows.of([record("p0001", measurements=(window,)), record("p0002")])
    samples = [PowerSample(t, w) for t, w in ((2.0, 900.0), (11.0, 20.0), (14.0, 31.0), (16.0, 80))]
    write_power_samples(tmp_path, "p0001", samples)
    assert _peak_W(windows, [0], tmp_path) == pytest.approx(31.0)
    assert _peak_W(windows, [1], tmp_path) is None
    assert _peak_W(windows, [0], None) is None
