"""Error rates of verification and of drift detection.

Both are run many times on random launches and blocks whose truth is known. A choice that is no
better than the baseline should be rejected (the search found it by luck), and one that is better by
a given percentage should be confirmed, with a saving that is not stated too high (`saving_bias`). A
job that runs as measured should raise no alarm for as long as it lasts, and one that drifts should
raise one soon. Nothing is timed, so a busy machine does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from benchmarks.figures import Figure, arguments, publish
from tuner.deploy.drift import DriftMonitor, Expectation
from tuner.problem.settings import MOST_PAIRS
from tuner.results.alpha_spending import LEAST_PAIRS, MOST_TRIES, look_level, with_plan
from tuner.results.parts import Attempt
from tuner.results.verification import attempts_of, next_is_baseline
from tuner.search_spaces.configuration import Configuration
from tuner.workload.probe import Measurement, MeterInfo, ProbeRecord, ProbeRequest

METER = MeterInfo("drawn", "node", "a benchmark's draws", estimated=True)
BASELINE = Configuration.of(data_parallel=2, micro_batch=1)
TRIED = tuple(Configuration.of(data_parallel=2, micro_batch=size) for size in (2, 4, 8))
#: Time over the baseline's of a candidate that saves energy by a lower clock or power limit.
SLOWER = 1.03
#: Share of true savings that should be confirmed.
AIM = 0.7


def _launch(
    number: int,
    configuration: Configuration,
    seconds: float,
    power_W: float,
    purpose: str = "verify",
) -> ProbeRecord:
    window = Measurement(
        live=configuration.live,
        steps=10,
        window_s=10 * seconds,
        step_time_s=seconds,
        energy_J=10 * seconds * power_W,
        power_W=power_W,
    )
    request = ProbeRequest(f"p{number:04d}", configuration.launch, purpose=purpose)
    return ProbeRecord(request, (window,), METER)


def verified(
    rng: np.random.Generator,
    savings: Sequence[float],
    *,
    pairs: int = MOST_PAIRS * MOST_TRIES,
    spread: float = 0.01,
    power_spread: float = 0.02,
    time_ratio: float | None = None,
) -> tuple[Attempt | None, int]:
    """Verify candidates one after the other, pair by pair, until one is confirmed.

    The search had found 5 % less energy in each of them, by luck or not, at the power of the
    baseline or with another time.

    Args:
        rng: of the draws.
        savings: by what share each candidate's energy is truly lower, in order.
        pairs: room for pairs of launches in all.
        spread: standard deviation of a launch's log step time.
        power_spread: the same of its log power.
        time_ratio: each candidate's true time over the baseline's; None if power is the same, so
            that time is lower by the same share as energy.

    Returns:
        The attempt that confirmed a candidate, None if none did, and the pairs that it took.
    """
    records = [_launch(0, BASELINE, 1.0, 20.0, "baseline")]
    found_s = 0.95 if time_ratio is None else time_ratio
    records += [
        _launch(1 + i, tried, found_s, 20.0 * 0.95 / found_s, "search")
        for i, tried in enumerate(TRIED)
    ]
    made = 0
    planned: tuple[int, ...] = ()
    for rank, (tried, saving) in enumerate(zip(TRIED, savings, strict=False)):
        group: list[ProbeRecord] = []
        if pairs - made < LEAST_PAIRS:
            break
        planned = with_plan(planned, rank, pairs - made)
        while made < pairs:
            for _ in range(2):
                of_baseline = next_is_baseline(group, BASELINE)
                ratio = 1 - saving if time_ratio is None else time_ratio
                seconds = (1.0 if of_baseline else ratio) * math.exp(rng.normal(0, spread))
                power_W = 20.0 * (1.0 if of_baseline else (1 - saving) / ratio)
                power_W *= math.exp(rng.normal(0, power_spread))
                what = BASELINE if of_baseline else tried
                group.append(_launch(len(records) + len(group), what, seconds, power_W))
            made += 1
            attempts = attempts_of([*records, *group], BASELINE, planned=planned)
            found = [each for each in attempts if each.configuration == tried]
            if found and found[0].survived:
                return found[0], made
            if found and not found[0].undecided:
                break
        records += group
    return None, made


def saving_bias(attempts: Sequence[Attempt], saving: float) -> float:
    """Return by how much confirmed savings are stated too high.

    The mean error of every saving that was shown, of energy or time, over the mean half-width of
    their intervals, in logarithms; positive is too much. nan if none was shown.

    Args:
        attempts: that confirmed a candidate.
        saving: by what share its time and energy are truly lower.
    """
    shown = [d for a in attempts for d in (a.energy, a.step_time) if d and d.shown]
    errors = [math.log1p(-saving) - math.log1p(each.relative) for each in shown]
    halves = [(math.log1p(each.high) - math.log1p(each.low)) / 2 for each in shown]
    return float(np.mean(errors) / np.mean(halves)) if shown else math.nan


def pairs_needed(saving: float, spread: float) -> int:
    """Return the least number of pairs that would confirm a saving of energy alone in `AIM`.

    Of one look, at the level of the look at `MOST_PAIRS` pairs: with n pairs, the t statistic of
    2 (n - 1) degrees of freedom has the noncentrality -log(1 - saving) / (spread sqrt(2 / n)).

    Args:
        saving: share by which the energy is truly lower.
        spread: standard deviation of a launch's log energy.
    """
    level = look_level(0, MOST_PAIRS, (MOST_PAIRS,))
    for pairs in range(LEAST_PAIRS, 1000):
        freedom = 2 * (pairs - 1)
        apart = -math.log1p(-saving) / (spread * math.sqrt(2 / pairs))
        if stats.nct.sf(stats.t.isf(level, freedom), freedom, apart) >= AIM:
            return pairs
    raise ValueError(f"a saving of {saving} is lost in a spread of {spread}")


def _energy_alone(trials: int) -> list[Figure]:
    """Return how often 2 % less energy at 3 % more time, as of a lower clock, is confirmed."""
    figures = []
    for power_spread in (0.01, 0.02):
        rng = np.random.default_rng(int(1000 * power_spread))
        found = []
        for _ in range(trials):
            confirmed, _made = verified(
                rng, (0.02,), pairs=MOST_PAIRS, power_spread=power_spread, time_ratio=SLOWER
            )
            found.append(confirmed is not None)
        share, percents = float(np.mean(found)), round(100 * power_spread)
        needed = pairs_needed(0.02, math.hypot(0.01, power_spread))
        print(
            f"room for {MOST_PAIRS} pairs, truly 2 % less energy at 3 % more time, launches that "
            f"differ by {percents} % in power: confirmed in {100 * share:.1f} % (aim "
            f"{100 * AIM:.0f} %, which {needed} pairs would reach)"
        )
        name = f"power_2_percent_energy_{percents}_percent_spread"
        figures += [Figure(name, share, "ratio"), Figure(f"{name}_pairs", needed, "count")]
    return figures


def drift_at(rng: np.random.Generator, off: float, blocks: int) -> int | None:
    """The block at which a drift of the step time is told; None where none is."""
    expected = Expectation("drawn", 0.5, 100.0, (0.495, 0.505), (98.0, 102.0), 1000, METER)
    monitor = DriftMonitor(expected)
    for number in range(blocks):
        seconds = 0.5 * (1 + off) * math.exp(rng.normal(0, 0.01))
        if monitor.add_block(10, 10 * seconds, 1000 * seconds):
            return number + 1
    return None


def main() -> None:
    parser = arguments("how often verifying and drift detection are right")
    parser.add_argument("--trials", type=int, default=400)
    options = parser.parse_args()
    figures = []
    rng = np.random.default_rng(0)
    wrong = [verified(rng, (0.0, 0.0, 0.0)) for _ in range(3 * options.trials)]
    share = float(np.mean([confirmed is not None for confirmed, _ in wrong]))
    print(f"three candidates that are no better: one is confirmed in {100 * share:.1f} %")
    figures.append(Figure("false_confirmations", share, "ratio"))
    for pairs in (2, 3, 5):
        rng = np.random.default_rng(pairs)
        wrong = [verified(rng, (0.0, 0.0, 0.0), pairs=pairs) for _ in range(3 * options.trials)]
        share = float(np.mean([confirmed is not None for confirmed, _ in wrong]))
        print(f"the same with room for {pairs} pairs: one is confirmed in {100 * share:.1f} %")
        figures.append(Figure(f"false_confirmations_{pairs}_pairs", share, "ratio"))
    for pairs in (2, 3, 5, MOST_PAIRS):
        for saving in (0.02, 0.05, 0.10):
            rng = np.random.default_rng(int(1000 * saving) + pairs)
            found = [verified(rng, (saving,), pairs=pairs) for _ in range(options.trials)]
            confirmed = [attempt for attempt, _ in found if attempt is not None]
            share = len(confirmed) / len(found)
            made = float(np.mean([taken for _, taken in found]))
            bias = saving_bias(confirmed, saving)
            print(
                f"room for {pairs} pairs, truly {100 * saving:.0f} % less time and energy: "
                f"confirmed in "
                f"{100 * share:.1f} %, after {made:.1f} pairs; what is shown is stated "
                f"{bias:+.2f} half-widths too high"
            )
            name = f"{100 * saving:.0f}_percent"
            name += "" if pairs == MOST_PAIRS else f"_{pairs}_pairs"
            figures.append(Figure(f"power_{name}", share, "ratio"))
            figures.append(Figure(f"saving_bias_{name}", bias, "ratio"))
    figures += _energy_alone(options.trials)
    for off, blocks in ((0.0, 1000), (0.03, 1000), (0.05, 1000), (0.10, 1000)):
        rng = np.random.default_rng(int(1000 * off))
        trials = max(20, options.trials // 4)
        told = [drift_at(rng, off, blocks) for _ in range(trials)]
        seen = [block for block in told if block is not None]
        share = 100 * len(seen) / trials
        middle = float(np.median(seen)) if seen else math.nan
        print(f"step time {100 * off:.0f} % off: told in {share:.0f} %, after {middle:.0f} blocks")
        figures.append(Figure(f"drift_{100 * off:.0f}_per_cent_told", share, "%"))
        if off and seen:
            figures.append(Figure(f"drift_{100 * off:.0f}_per_cent_blocks", middle, "count"))
    publish(figures, options.json)


if __name__ == "__main__":
    main()
