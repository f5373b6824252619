"""Planners scored on the same measured launches.

`python -m benchmarks.planners` predicts vTrain's 1,549 launches of Megatron-DeepSpeed on A100 by
the analytic models as they ship, and by the models after one measured launch of each problem (what
is run today), and prints the error, the pairs of launches in the right order and what the choice
loses, and which constants saw which rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from tempfile import TemporaryDirectory

import numpy as np
from scipy.optimize import least_squares

import tuner
from benchmarks.figures import Figure, arguments, publish
from benchmarks.validation import qlora, sfttrainer, simumax
from benchmarks.validation.comparison import models, table
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
from tuner.search_spaces.job import TrainingJob, load_job

HEADS = ("planner", "launches", "rows", "median", "mean", "worst", "pairs right", "choice loses")


def _row(planner: str, rows: str, found: Score) -> tuple[str, ...]:
    return (
        planner,
        rows,
        f"{len(found.errors)}",
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


def moe_default_over_full() -> float:
    """Return the recommended time in the default space over that in the full one, at worst.

    Of mixtures of experts on four nodes; nothing was fitted to them.
    """
    ratios = []
    mixtures = {
        "Qwen3-30B-A3B": models()["qwen3-30b-a3b"],
        "OLMoE-1B-7B": dict(load_job("olmoe-1b-7b").model),
    }
    for name, config in mixtures.items():
        job = TrainingJob(name, config, sequence_length=4096, global_batch=512, steps=1000)
        with TemporaryDirectory() as folder:
            asked = {"cluster": "h100-32", "runs_dir": folder, "report": False}
            default, full = (tuner.plan(job, space=space, **asked) for space in (None, "full"))  # type: ignore[arg-type]
        assert default.best is not None
        assert full.best is not None
        ratios.append(default.best.time_to_solution_s / full.best.time_to_solution_s)
        print(f"{name}: recommended in the default space, over the full one: {ratios[-1]:.3f}")
    return max(ratios)


def main() -> None:
    parser = arguments(__doc__, "planners")
    parser.add_argument("--fit", action="store_true", help="print operator_s and unit_s as fitted")
    options = parser.parse_args()
    if options.fit:
        print(f"operator_s = {fitted_operator_s(read_launches()):.2g}")
        seen = [run for run in sfttrainer.read_runs() if run.row["model"] == sfttrainer.FITTED]
        print(f"unit_s = {sfttrainer.fitted_unit_s(seen):.3g}")
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
    print("\n".join(table(HEADS, rows)))
    print(SEEN, flush=True)
    others = [simumax.compare(), qlora.compare(), sfttrainer.compare()]
    for lines, _ in others:
        print("\n".join(["", *lines]), flush=True)
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
            *(figure for _, each in others for figure in each),
            Figure("moe_default_over_full", moe_default_over_full(), "ratio"),
        ],
        options.json,
    )


SEEN = (
    "which constants saw which rows: recompute_operators was fitted to 150 launches of width 1,024 "
    "on one node (tuned), and nothing to the others (held out); operator_s of eager programs is "
    "that of another measurement on GH200. One launch of each problem corrects the constants of "
    "that problem alone, and is left out of its errors and pairs; unit_s was fitted to runs of "
    "Llama-3.1 8B by FSDP (tuned), and those of ALLaM-13B are held out"
)


if __name__ == "__main__":
    main()
