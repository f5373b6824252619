"""`tuner run --tune` and `--follow-power`: clocks that are set while a command trains."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from tuner.cli.options import announcer, made_of_options, print_answer, require_trust
from tuner.cli.run import OF_TUNING
from tuner.formatting import duration, energy_text, label, right_aligned
from tuner.online.request import TuningOutcome
from tuner.online.response import Balance
from tuner.online.settings import EarlierMeasurements, earlier_of
from tuner.problem.constraints import LIMITS, Constraints
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import dump_fields
from tuner.workload.node.measure.stragglers import RankState, Straggler, sentence


def tune_command(args: argparse.Namespace) -> int:
    """Run the command after -- with tuned clocks, and print how it went; return the exit code."""
    from tuner.online.agent import tune
    from tuner.online.metrics import Metrics
    from tuner.online.request import TuningRequest
    from tuner.receipt.measure import end_as
    from tuner.search_spaces.knob_declarations import load_pack, parse_knob
    from tuner.workload.scripts.user_code import of_files

    subject = "--tune" if args.tune else "--follow-power"
    if args.tune and args.follow_power:
        raise InputError("--follow-power sets the clocks by its target; leave out --tune")
    if not args.clocks:
        raise InputError(f"{subject} sets the clocks; leave out --no-clocks")
    if not args.program:
        raise InputError(f"{subject} needs the command that trains after --: -- torchrun ...")
    request = TuningRequest(
        made_of_options(args, Constraints, only=OF_TUNING),
        args.steps,
        args.follow_power,
        _earlier(args),
        Path(args.runs_dir) / "tuned" if args.tune else None,
        (*(k for pack in args.knobs for k in load_pack(pack).knobs), *map(parse_knob, args.knob)),
    )
    require_trust(args, of_files(args.knobs, None, None))
    output = 2 if args.json else None  # with --json standard output is the answer alone
    announce = announcer(args, "tuner: ")
    with ExitStack() as publishing:
        metrics = None
        if args.metrics_port is not None or args.metrics_file is not None:
            metrics = publishing.enter_context(
                closing(Metrics(args.metrics_file, announce=announce))
            )
        if metrics is not None and args.metrics_port is not None:
            publishing.enter_context(metrics.served(args.metrics_port))
        done = tune(
            args.program,
            request,
            metrics=metrics,
            announce=announce,
            output=output,
            ignored=args.ignored_signals,
        )
    print_answer(args, tuning_json(done), tuning_lines(done))
    return end_as(done.exit_code)


def _earlier(args: argparse.Namespace) -> EarlierMeasurements | None:
    # Measurements that a tuned training begins with, if a run of them is named.
    if args.run is not None and args.transfer is not None:
        raise InputError("name a run, or --transfer with an earlier tuned training, and not both")
    if args.transfer is not None:
        return earlier_of(Path(args.transfer))
    if args.run is None:
        return None
    from tuner.problem.run_folder import find_run

    return earlier_of(find_run(args.run, args.runs_dir).path, args.point)


#: What is said before the reason why a training was not tuned to its end.
ENDED: Mapping[str, str] = {
    "unmetered": "Not tuned on this machine",
    "fixed": "Not tuned, because no clock can be set here",
    "length": "Not tuned",
    "refused": "Tuned until the devices refused their settings",
    "meter": "Tuned until the meter failed",
    "fault": "Tuned until a fault of tuner",
}


#: Targets of power, and changes, that are shown one by one.
SHOWN = 12
NOTICED = "Change noticed after {0.step} steps: {0.quantity} {1:+.0f} %."


def tuning_lines(outcome: TuningOutcome) -> list[str]:
    """Return the outcome as sentences: saving, exploring, promise, changes, failures."""
    lines = []
    if outcome.ended:
        lines.append(f"{ENDED[outcome.ended]}: {outcome.problem}.")
    balance = outcome.balance
    if balance.seconds:
        mark = label(outcome.meter.mark) if outcome.meter else ""
        lines.append(
            f"{outcome.steps} steps in {duration(balance.seconds)} took "
            f"{energy_text(balance.energy_J / 1000)}{mark}: {_saved(balance)} at the highest "
            "setting."
        )
        less, slowdown, more = balance.slowdown
        lost = f"Slowdown {100 * slowdown:.1f} % [{100 * less:.1f}, {100 * more:.1f}] %"
        if outcome.max_slowdown is not None:
            word = "kept" if outcome.kept else "broken"
            lost += f": the promise of at most {100 * outcome.max_slowdown:g} % was {word}"
        explored = 100 * balance.exploring_J / balance.energy_J
        exploration = "" if outcome.periods else f" Exploring cost {explored:.1f} % of the energy."
        lines.append(f"{lost}.{exploration}")
        lines += _first(
            [
                f"Asked {each.target_W:g} W for {duration(each.seconds)}: "
                f"{each.energy_J / each.seconds:.0f} W delivered, "
                f"{duration(each.beyond_s)} of it above the target."
                for each in outcome.periods
                if each.target_W is not None and each.seconds
            ]
        )
        shares = sorted(enumerate(outcome.seconds_at), key=lambda each: -each[1])
        named = [
            f"{outcome.settings[at] or 'the highest'} {100 * seconds / balance.seconds:.0f} %"
            for at, seconds in shares
            if seconds > 0.01 * balance.seconds
        ]
        lines.append(f"Time at each setting: {', '.join(named)}.")
        learned = any(outcome.seconds_at[1:])
        if not learned and outcome.kept and not (outcome.ended or outcome.periods):
            time = duration(balance.seconds)
            lines.append(f"No lower setting was tried: {time} left no time for one by the promise.")
        if outcome.record is not None and learned:
            lines.append(f"To begin the next run with this: --transfer {outcome.record}")
    elif not outcome.ended:
        lines.append("The training ended before its steps could be measured.")
    lines += _first([NOTICED.format(each, 100 * each.relative) for each in outcome.changes])
    lines += [_limit_line(*limit) for limit in outcome.limits]
    lines += ranks_lines(outcome.ranks, outcome.stragglers)
    if outcome.not_restored:
        lines.append(f"Not put back: {outcome.not_restored}.")
    if outcome.exit_code:
        lines.append(f"The command ended with exit code {outcome.exit_code}.")
    return lines


def _saved(balance: Balance) -> str:
    low, share, high = (100 * joules / (balance.energy_J + joules) for joules in balance.saved_J)
    if f"{low:.1f} {high:.1f}" in ("0.0 0.0", "-0.0 0.0"):
        return "as much as"
    if share < 0:
        return f"{-share:.1f} % more [{-high:.1f}, {-low:.1f}] % than"
    return f"{share:.1f} % less [{low:.1f}, {high:.1f}] % than"


def _limit_line(name: str, limit: float, took: float) -> str:
    row = next(row for row in LIMITS if row.name == name)
    text = duration if name == "deadline_s" else energy_text
    word = "kept" if took <= limit else "missed"
    return f"The command took {text(took)}: its {row.noun} of {text(limit)} was {word}."


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - SHOWN
    return lines if more <= 0 else [*lines[:SHOWN], f"And {more} more (see --json)."]


def tuning_json(outcome: TuningOutcome) -> dict[str, Any]:
    """Return the outcome as JSON."""
    balance = outcome.balance
    return {
        **{name: value for name, value in vars(outcome).items() if name != "meter"},
        "meter": dict(vars(outcome.meter)) if outcome.meter else None,
        "balance": {**vars(balance), "slowdown": balance.slowdown},
        "changes": [dict(vars(change)) for change in outcome.changes],
        "periods": [dict(vars(period)) for period in outcome.periods],
        "kept": outcome.kept,
        "record": str(outcome.record) if outcome.record else None,
        "ranks": [vars(state) for state in outcome.ranks],
        "stragglers": [dump_fields(each) for each in outcome.stragglers],
    }


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


#: Heading of each column, and its text; a column that is empty for all ranks is left out.
_COLUMNS: Mapping[str, Callable[[RankState, float | None], str]] = {
    "rank": lambda state, behind: str(state.rank),
    "GPU": lambda state, behind: "" if state.device is None else str(state.device),
    "behind": lambda state, behind: _share(behind),
    "MHz": lambda state, behind: _number(state.clock_MHz),
    "W": lambda state, behind: _number(state.power_W),
    "°C": lambda state, behind: _number(state.temperature_C),
    "throttled": lambda state, behind: ", ".join(
        f"{name} {_share(part)}" for name, part in state.throttled.items() if part
    ),
    "memory errors": lambda state, behind: _number(sum(state.faults.values()) or None),
    "nice": lambda state, behind: str(state.nice or ""),
    "computes": lambda state, behind: _share(state.busy),
    "waits for a core": lambda state, behind: _share(state.waiting),
    "held by quota": lambda state, behind: _share(state.held or None),
}


def ranks_lines(ranks: Sequence[RankState], stragglers: Sequence[Straggler]) -> list[str]:
    """Return the stragglers as sentences, and the table of all ranks; empty without stragglers."""
    if not stragglers:
        return []
    behind = {each.state.rank: each.behind for each in stragglers}
    rows = [[text(state, behind.get(state.rank)) for text in _COLUMNS.values()] for state in ranks]
    shown = [at for at in range(len(_COLUMNS)) if any(row[at] for row in rows)]
    table = [list(_COLUMNS), *rows]
    return [
        *(f"Straggler: {sentence(each)}." for each in stragglers),
        *right_aligned([[row[at] for at in shown] for row in table], indent="  "),
    ]
