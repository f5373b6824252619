"""Launches of torchrun, deepspeed, accelerate and trl, read by their own parsers.

`tuner.workload.scripts.launchers` runs this file in an interpreter of its own, because the
parsers import torch and may end the process. It gets the launcher's name and arguments as JSON on
standard input, and prints one line of JSON with the fields below after `MARK`. The functions of
torch, DeepSpeed and Accelerate which compute the environment of the ranks are called, and nothing
is started.

    script      the words that each rank runs
    given       the number of words at the end of the arguments that the launcher leaves alone
    refuse      in place of all others, the sentence why it cannot be honoured
    binding     "numa:MODE" or "cores:LIST"; absent if it does not bind ranks to cores
    processes, nodes, env, notes    as in `script_facts.Launcher`
"""

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

MARK = "joulefront-launcher "

#: What each rank is told by us.
_OURS = {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTHONPATH"}


class Refused(Exception):
    """A command that cannot be honoured, with the sentence why."""


def main() -> None:
    """Answer one question from standard input."""
    question = json.load(sys.stdin)
    try:
        reply = READERS[question["launcher"]](question["arguments"])
    except Refused as error:
        reply = {"refuse": str(error)}
    except ImportError as error:
        reply = {"refuse": f"it cannot be imported here ({error})"}
    except (Exception, AssertionError) as error:
        reply = {"refuse": f"it refuses this command: {error or type(error).__name__}"}
    print("\n" + MARK + json.dumps(reply), flush=True)


def torchrun(arguments: Sequence[str]) -> dict[str, Any]:
    """Read the arguments of torchrun, which is `python -m torch.distributed.run`."""
    from torch.distributed.run import parse_args, parse_min_max_nnodes

    args = parse_args(list(arguments))
    least, nodes = parse_min_max_nnodes(args.nnodes)
    if args.no_python:
        _no_python("--no-python")
    each = str(args.nproc_per_node)
    processes = int(each) if each.isdigit() else 0
    if each.isdigit() and not processes:
        raise Refused("--nproc-per-node must be at least 1")
    notes = []
    if least != nodes:
        notes.append(f"--nnodes {args.nnodes} may shrink, and probes take {nodes} nodes")
    env = {**_elastic(args, nodes), **_one_thread(processes)}
    read = _read(args, processes, env, notes=notes, nodes=nodes)
    if mode := getattr(args, "numa_binding", None):
        read["binding"] = f"numa:{getattr(mode, 'value', mode)}"
    return read


def _elastic(args: argparse.Namespace, nodes: int) -> dict[str, str]:
    # Return what torchrun's agent tells its ranks (torch's local_elastic_agent.py).
    rdzv_id = getattr(args, "rdzv_id", "none")
    return {
        "GROUP_RANK": "{node_rank}",
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_RANK": "{rank}",
        "ROLE_WORLD_SIZE": "{world_size}",
        "ROLE_NAME": str(getattr(args, "role", "default")),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(getattr(args, "max_restarts", 0)),
        "TORCHELASTIC_RUN_ID": str(rdzv_id),
    }


def _one_thread(processes: int) -> dict[str, str]:
    # Return OMP_NUM_THREADS=1 where torchrun sets it: several ranks, and the user set none.
    return {} if processes == 1 or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}


def deepspeed(arguments: Sequence[str]) -> dict[str, Any]:
    """Read the arguments of DeepSpeed's launcher."""
    from deepspeed.launcher.runner import fetch_hostfile, parse_args

    args = parse_args(list(arguments))
    if not args.user_script:
        raise Refused("it names no script")
    if args.autotuning:
        raise Refused("--autotuning starts a search of its own; leave it out")
    if args.no_python:
        _no_python("--no_python")
    hosts = fetch_hostfile(args.hostfile) or {}
    nodes = args.num_nodes if args.num_nodes > 0 else max(len(hosts), 1)
    used = list(hosts.values())[:nodes]
    if len(set(used)) > 1:
        raise Refused(
            f"{args.hostfile} gives nodes different numbers of slots, and a probe has as many "
            "ranks on each"
        )
    if args.exclude:
        raise Refused(f"--exclude {args.exclude}: {_visible('the others')}")
    processes = max(args.num_gpus, 0) or (int(used[0]) if used and nodes > 1 else 0)
    if args.include:
        if "@" in args.include:
            raise Refused(
                f"--include {args.include} chooses among several nodes; name them all in the "
                "hostfile"
            )
        slots = args.include.partition(":")[2]
        processes = _first_devices(slots, f"--include {args.include}") if slots else 0
    env = {"CROSS_RANK": "{node_rank}", "CROSS_SIZE": str(nodes)}
    read = _read(args, processes, env, (), args.user_script, args.user_args, nodes)
    if args.bind_cores_to_rank:
        read["binding"] = f"cores:{args.bind_core_list or ''}"
    if not args.no_local_rank:
        read["script"].insert(2 if args.module else 1, "--local_rank={local_rank}")
    return read


def accelerate(arguments: Sequence[str]) -> dict[str, Any]:
    """Read the arguments of `accelerate launch` and its configuration file."""
    from accelerate.commands.launch import launch_command_parser

    return _accelerate(launch_command_parser().parse_args(list(arguments)))


def _accelerate(args: argparse.Namespace) -> dict[str, Any]:
    from accelerate.commands import launch as accelerate_launch
    from accelerate.utils import check_cuda_p2p_ib_support
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    args, defaults, from_file = accelerate_launch._validate_launch_command(args)
    nodes = int(args.num_machines or 1)
    if args.no_python:
        _no_python("--no_python")
    if getattr(args, "mpirun_hostfile", None):
        raise Refused("mpirun_hostfile starts the ranks by MPI, which is joulefront's part here")
    notes: list[str] = []
    processes = int(args.num_processes or 0)
    if processes % nodes:
        raise Refused(f"num_processes {processes} is not a multiple of the {nodes} machines")
    processes //= nodes  # it counts those of all machines
    if args.use_deepspeed and not args.cpu:
        fields = list(defaults.deepspeed_config) if defaults else []
        fields += ["mixed_precision"] * from_file
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        _, env = prepare_deepspeed_cmd_env(args)
        env = {**_elastic(args, nodes), **_one_thread(processes), **env}
    elif (args.use_fsdp or args.use_megatron_lm or args.multi_gpu) and not args.cpu:
        env = {**_elastic(args, nodes), **prepare_multi_gpu_env(args)}
    else:
        _, env = prepare_simple_launcher_cmd_env(args)
        if processes > 1:
            notes.append(
                f"num_processes is {processes}, but accelerate starts 1 process with these "
                "settings (neither multi_gpu nor DeepSpeed nor FSDP), and so does today's command"
            )
        processes = 1
    if not check_cuda_p2p_ib_support():
        env = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", **env}
    if "CUDA_VISIBLE_DEVICES" in env and args.gpu_ids not in (None, "all"):
        _first_devices(str(args.gpu_ids), f"gpu_ids {args.gpu_ids}")
    return _read(args, processes, env, notes, nodes=nodes)


def trl(arguments: Sequence[str]) -> dict[str, Any]:
    """Read the arguments of `trl COMMAND`, which starts a script of its own by accelerate."""
    import accelerate.commands.launch as accelerate_launch

    caught: list[argparse.Namespace] = []
    # TRL's own command line is run up to the place where it would launch.
    accelerate_launch.launch_command = caught.append
    (*_, entry) = (None, *importlib.metadata.entry_points(group="console_scripts", name="trl"))
    if entry is None:
        raise Refused("it is not installed here; give the file that it trains by, or its script")
    sys.argv = ["trl", *arguments]
    entry.load()()
    if not caught:
        raise Refused(f"trl {arguments[0] if arguments else ''} trains nothing")
    return {**_accelerate(caught[0]), "given": len(arguments)}


READERS: dict[str, Callable[[Sequence[str]], dict[str, Any]]] = {
    "torchrun": torchrun,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "trl": trl,
}


def _read(
    args: argparse.Namespace,
    processes: int,
    env: dict[str, str],
    notes: Sequence[str] = (),
    script: str | None = None,
    rest: Sequence[str] | None = None,
    nodes: int = 1,
) -> dict[str, Any]:
    script = args.training_script if script is None else script
    rest = args.training_script_args if rest is None else rest
    changed = {
        name: value
        for name, value in env.items()
        if name not in _OURS and os.environ.get(name) != value
    }
    if str(changed.get("CUDA_VISIBLE_DEVICES", "")):
        del changed["CUDA_VISIBLE_DEVICES"]  # the first ones, which are a probe's too
    return {
        "script": ["-m"] * bool(args.module) + [script, *rest],
        "given": 1 + len(rest),
        "processes": processes,
        "nodes": nodes,
        "env": changed,
        "notes": list(notes),
    }


def _no_python(option: str) -> NoReturn:
    raise Refused(f"{option} starts another program than Python's, and a probe needs a script")


def _visible(devices: str) -> str:
    return (
        f"probes and their meter take the GPUs that tuner sees; name {devices} by "
        "CUDA_VISIBLE_DEVICES=... before tuner instead"
    )


def _first_devices(text: str, option: str) -> int:
    numbers = [item for item in text.replace(" ", "").split(",") if item]
    if numbers != [str(number) for number in range(len(numbers))]:
        raise Refused(f"{option}: {_visible('those')}")
    return len(numbers)


if __name__ == "__main__":
    main()
