"""Error rates of verification and of drift detection.

Both are run many times on random launches and blocks whose truth is known. A choice that is no
better than the baseline should be rejected (the search found it by luck), and one that is better by
a given percentage should be confirmed. A job that runs as measured should raise no alarm for as
long as it lasts, and one that drifts should raise one soon. Nothing is timed, so a busy machine
does not matter.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.figures import Figure, arguments, publish
from tuner.deploy.drift import DriftMonitor, Expectation
from tuner.results.verification import attempts_of, next_is_baseline
from tuner.search_spaces.configuration import Configuration
from tuner.workload.probe import Measurement, MeterInfo, ProbeRecord, ProbeRequest

METER = MeterInfo("drawn", "node", "a benchmark's draws", estimated=True)
BASELINE = Configuration.of(data_parallel=2, micro_batch=1)
TRIED = Configuration.of(data_parallel=2, micro_batch=2)


def _launch(
    number: int, tried: bool, seconds: float, power_W: float, purpose: str = "verify"
) -> ProbeRecord:
    window = Measurement(
        live=(TRIED if tried else BASELINE).live,
        steps=10,
        window_s=10 * seconds,
        step_time_s=seconds,
        energy_J=10 * seconds * power_W,
        power_W=power_W,
    )
    launch = (TRIED if tried else BASELINE).launch
    return ProbeRecord(ProbeRequest(f"p{number:04d}", launch, purpose=purpose), (window,), METER)


def survived(
    rng: np.random.Generator, saving: float, pairs: int, spread: float, earlier: float | None = None
) -> bool:
    """One verification: time and energy truly lower by `saving`, launches that differ by `spread`.

    The search had found it 5 % better in both, by luck or not.

    Args:
        rng: of the draws.
        saving: by what share the truth is lower.
        pairs: launches of each.
        spread: standard deviation of a launch's log step time; of its log power twice that.
        earlier: the same while the search ran, which launched two configurations twice each; None:
            it launched nothing twice.
    """
    records = [_launch(0, False, 1.0, 20.0, "baseline"), _launch(1, True, 0.95, 20.0, "search")]
    if earlier is not None:
        records = [
            _launch(
                900 + number,
                tried,
                (0.95 if tried else 1.0) * math.exp(rng.normal(0, earlier)),
                20.0 * math.exp(rng.normal(0, 2 * earlier)),
                "search" if tried or number else "baseline",
            )
            for number, tried in enumerate((False, True, False, True))
        ]
    group: list[ProbeRecord] = []
    while len(group) < 2 * pairs:
        tried = not next_is_baseline(group, BASELINE)
        seconds = (1 - saving if tried else 1.0) * math.exp(rng.normal(0, spread))
        power_W = 20.0 * math.exp(rng.normal(0, 2 * spread))
        group.append(_launch(2 + len(group), tried, seconds, power_W))
    (attempt,) = attempts_of([*records, *group], BASELINE)
    return attempt.survived


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
    for pairs in (2, 3):
        for saving in (0.0, 0.02, 0.05, 0.10):
            rng = np.random.default_rng(int(1000 * saving) + pairs)
            kept = sum(survived(rng, saving, pairs, 0.01) for _ in range(options.trials))
            share = 100 * kept / options.trials
            print(f"{pairs} pairs, truly {100 * saving:.0f} % better: survives in {share:.1f} %")
            name = f"survives_{100 * saving:.0f}_per_cent_better_{pairs}_pairs"
            figures.append(Figure(name, share, "%"))
    for what, earlier in (("as_noisy", 0.01), ("calmer", 0.003), ("noisier", 0.03)):
        for saving in (0.0, 0.05):
            rng = np.random.default_rng(int(1000 * saving) + 77)
            kept = sum(survived(rng, saving, 2, 0.01, earlier) for _ in range(options.trials))
            share = 100 * kept / options.trials
            print(f"2 pairs after a search {what}, {100 * saving:.0f} %: survives in {share:.1f} %")
            name = f"survives_{100 * saving:.0f}_per_cent_better_search_{what}"
            figures.append(Figure(name, share, "%"))
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
