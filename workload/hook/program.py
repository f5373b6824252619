"""Start of the training program as `__main__` with the hook around it.

A rank of a probe gets its connection to the agent first, and reports its end there, however it
comes. Under `launch.sh` the same settings are applied to the program and nothing is reported. The
hook imports neither torch nor DeepSpeed before this module.
"""

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

from . import batch_counts, engine, frames, source, state, steps, torch_settings, watching
from .link import Link, end_process
from .loopback import MEETING, RANKS, listen_on_loopback, meet_in_files, run_program

#: Variables by which a program recognises that a launcher has started it.
_OF_RANKS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
)


def prepare(options: Mapping[str, Any]) -> None:
    """Take the options of this launch, before the program imports anything."""
    state.options.clear()
    state.options.update(options)
    state.seen.clear()
    watching.counter.forget()
    state.forget_live()
    sys.path[:0] = options.get("path", [])
    os.environ.update(options.get("env", {}))
    if options.get("inspect") or options.get("counts"):
        source.watch_arguments(inherited=state.attachment is not None)
    steps.ImportHook(frames.NAMES, frames.stand_around)
    steps.ImportHook(("deepspeed",), _patch_deepspeed)
    if state.probed:
        steps.ImportHook((RANKS,), lambda _, ranks: meet_in_files(ranks))
        steps.ImportHook(("torch._dynamo.callback",), frames.mark_compilations)


def _patch_deepspeed(_: str, deepspeed: Any) -> None:
    # In a program that runs as it stands, what cannot be observed is no reason to stop.
    with contextlib.suppress(*(() if state.attachment is None else (Exception,))):
        engine.patch_deepspeed(deepspeed)


def prepare_torch(torch: Any) -> None:
    """Count the steps, and on request the batches, of this process's training."""
    options = state.options
    inspects = bool(options.get("inspect") or options.get("compares"))
    torch_settings.set_chosen(torch)
    watching.patch_torch(torch)
    if state.probed or options.get("activation_checkpointing"):
        counts = (
            batch_counts.StepCounts(torch, watching.counter.takes, inspects=inspects)
            if inspects or options.get("counts")
            else None
        )
        state.seen["counted"], state.seen["watched"] = counts, watching.Forwards(torch, counts)
    if inspects:
        _seed()
    if options.get("quiet"):
        frames.silence(torch)


def _prepare_rank(options: Mapping[str, Any], folder: str = "") -> None:
    # Prepare a process that the agent, or a launch file, starts as one rank.
    if folder and os.environ.get("GROUP_WORLD_SIZE") == "1":
        os.environ[MEETING] = folder
    prepare(options)
    import torch

    if not state.probed and os.environ.get("MASTER_ADDR") == "127.0.0.1":
        listen_on_loopback(RANKS)  # nothing beyond this machine meets there
    if state.probed:
        frames.refuse_spawn()
    prepare_torch(torch)
    for name in _OF_RANKS if options.get("bare") else ():
        os.environ.pop(name, None)


def _seed() -> None:
    # Seed what the program may leave unseeded, so that two looks train on the same samples. Which
    # rank a process of multiprocessing will be is unknown here.
    if any("multiprocessing" in word for word in sys.orig_argv):
        return
    import random

    import torch

    rank = int(os.environ.get("RANK", "0"))
    random.seed(rank)
    torch.manual_seed(rank)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(rank)


def _follow_python_path() -> None:
    # The interpreter that was forked has not read this rank's PYTHONPATH.
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [path for path in map(os.path.abspath, named) if path not in sys.path]


def run_rank(spec: dict[str, Any]) -> NoReturn:
    """Become a rank: environment, link, then the training program as `__main__`."""
    state.link = link = Link(spec["address"], int(os.environ["RANK"]))
    state.probed = True
    try:
        torch = sys.modules.get("torch")
        if torch is not None and "OMP_NUM_THREADS" in os.environ:
            # A forked rank read OMP_NUM_THREADS before it was set for it.
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        _follow_python_path()
        _prepare_rank(spec.get("options") or {}, os.path.dirname(spec["address"]))
        run_program(list(spec["argv"]))
        link.send("end")
    except SystemExit as stop:
        link.send("end")
        end_process(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
    except BaseException as error:
        traceback.print_exc()
        link.fail(error)
        end_process(1)
    end_process(0)


def main(arguments: list[str]) -> None:
    """Run the command that follows the hook's path."""
    if arguments[:1] == ["rank"]:
        run_rank(json.loads(arguments[1]))
    elif arguments[:1] == ["run"] and len(arguments) > 1:
        # srun names its tasks in its own way.
        names = {"rank": "PROCID", "local_rank": "LOCALID", "world_size": "NTASKS"}
        mine = {
            name: os.environ.get(name.upper()) or os.environ[f"SLURM_{slurm}"]
            for name, slurm in names.items()
        }
        with open(os.environ["JOULEFRONT_OPTIONS"], encoding="utf-8") as file:
            _prepare_rank(json.load(file))
        words = arguments[1:]
        for name, value in mine.items():
            words = [word.replace(f"{{{name}}}", value) for word in words]
        run_program(words)
    elif "watch" in arguments[:2] and len(arguments) > arguments.index("watch") + 1:
        # deepspeed puts --local_rank=N behind the first script that it sees; it is the program's.
        at = arguments.index("watch")
        ranks, program = arguments[:at], arguments[at + 1 :]
        named = 2 if program[0] == "-m" else 1
        # A part of the extra that starts the program so.
        importlib.import_module(f"{__package__}.online_marks").watch_program()
        run_program([*program[:named], *ranks, *program[named:]])
    else:
        print("joulefront_hook rank SPEC | run SCRIPT ... | watch SCRIPT ...", file=sys.stderr)
        sys.exit(2)
