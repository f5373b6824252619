"""Planners scored on the same measured launches.

`python -m benchmarks.planners` predicts vTrain's 1,549 launches of Megatron-DeepSpeed on A100 by
the analytic models as they ship, and by the models after one measured launch of each problem (what
is run today), and prints the error, the pairs of launches in the right order and what the choice
loses, and which constants saw which rows. `--calculon DIR` scores Calculon on the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.figures import Figure, arguments, publish
from benchmarks.validation.comparison import table
from benchmarks.validation.foreign import calculon_s
from benchmarks.validation.vtrain import (
    Launch,
    Score,
    first_launch,
    merged,
    one_launch_s,
    predicted_s,
    problems,
    read_launches,
    score,
)
from tuner.models.analytic.constants import load_constants

HEADS = ("planner", "launches", "rows", "median", "mean", "worst", "pairs right", "choice loses")


def _row(planner: str, rows: str, found: Score) -> tuple[str, ...]:
    return (
        planner,
        rows,
        f"{len(found.errors)}" + (f" of {len(found.errors) + found.refused}" * (found.refused > 0)),
        f"{found.median:.1f} %",
        f"{found.mean:.1f} %",
        f"{100 * abs(found.errors).max():.0f} %",
        f"{100 * found.right / found.pairs:.1f} %",
        f"{found.choice_loss:.1f} %" if len(found.losses) else "",
    )


def groups(launches: Sequence[Launch]) -> dict[str, list[Launch]]:
    """Return the launches by what they are held out from."""
    return {
        "one node": [each for each in launches if each.single],
        "one node, width 1,024": [each for each in launches if each.problem[2] == 1024],
        "one node, width 2,048": [each for each in launches if each.problem[2] == 2048],
        "64 to 512 GPUs": [each for each in launches if not each.single],
    }


def _calculon(by_name: dict[str, list[Launch]], checkout: Path) -> dict[str, Score]:
    """Return the scores of Calculon, which no row corrects."""
    every = [each for name in ("one node", "64 to 512 GPUs") for each in by_name[name]]
    said = dict(zip(every, calculon_s(every, checkout), strict=True))
    return {
        name: score(lambda group: np.array([said[each] for each in group]), rows)
        for name, rows in by_name.items()
    }


def fitted_operator_s(launches: Sequence[Launch]) -> float:
    """Return the seconds of an operator that fit every third problem of width 1,024 best.

    By least squares of log time, launches that are more than a tenth off counting linearly.
    """
    base = load_constants("cuda")
    by_problem = problems([each for each in launches if each.single and each.problem[2] == 1024])
    fitted_to = [by_problem[problem] for problem in sorted(by_problem)[::3]]
    measured = [np.log([each.measured_s for each in group]) for group in fitted_to]

    def residual(log: np.ndarray) -> np.ndarray:
        constants = replace(base, operator_s=float(np.exp(log[0])))
        said = [np.log(predicted_s(group, constants)) for group in fitted_to]
        return np.concatenate(said) - np.concatenate(measured)

    start = np.array([np.log(base.operator_s)])
    return float(np.exp(least_squares(residual, start, loss="soft_l1", f_scale=0.1).x[0]))


def main() -> None:
    """Print the figures."""
    parser = arguments("Planners on the same measured launches.")
    parser.add_argument("--fit", action="store_true", help="print the fitted operator_s")
    parser.add_argument(
        "--calculon", type=Path, metavar="DIR", help="score Calculon, too, of this checkout"
    )
    options = parser.parse_args()
    if options.fit:
        print(f"operator_s = {fitted_operator_s(read_launches()):.2g}")
        return
    by_name = groups(read_launches())
    shipped = {name: score(predicted_s, rows) for name, rows in by_name.items()}
    corrected = {
        name: score(one_launch_s, rows, leave_out=first_launch)
        for name, rows in by_name.items()
        if "width" in name
    }
    corrected["one node"] = merged(list(corrected.values()))
    rows = [_row("shipped", name, found) for name, found in shipped.items()]
    rows += [_row("after one launch", name, found) for name, found in corrected.items()]
    foreign = {} if options.calculon is None else _calculon(by_name, options.calculon)
    rows += [_row("Calculon", name, found) for name, found in foreign.items()]
    print("\n".join(table(HEADS, rows)))
    print(SEEN, flush=True)
    single, multi = shipped["one node"], shipped["64 to 512 GPUs"]
    after = corrected["one node"]
    publish(
        [
            Figure("vtrain_single_mean", single.mean, "%"),
            Figure("vtrain_single_held_out_mean", shipped["one node, width 2,048"].mean, "%"),
            Figure("vtrain_multi_mean", multi.mean, "%"),
            Figure("vtrain_pairs", single.right / single.pairs, "ratio"),
            Figure("vtrain_choice_loss_mean", single.choice_loss, "%"),
            Figure("vtrain_single_mean_one_launch", after.mean, "%"),
            Figure("vtrain_pairs_one_launch", after.right / after.pairs, "ratio"),
            Figure("vtrain_choice_loss_mean_one_launch", after.choice_loss, "%"),
            *(
                Figure(f"calculon_vtrain_{where}_mean", foreign[name].mean, "%")
                for where, name in (("single", "one node"), ("multi", "64 to 512 GPUs"))
                if foreign
            ),
            Figure("planners_scored", 2 + bool(foreign), "count"),
        ],
        options.json,
    )


SEEN = (
    "which constants saw which rows: none saw any; operator_s of eager programs is that of "
    "another measurement on GH200. One launch of each problem corrects the constants of that "
    "problem alone, and is left out of its errors and pairs"
)


if __name__ == "__main__":
    main()
