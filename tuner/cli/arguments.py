"""Arguments that several commands have, each declared once."""

from __future__ import annotations

import os
from typing import Any

#: Environment variable of the folder of the runs.
RUNS = "JOULEFRONT_RUNS"
#: Folder of the runs if nothing names one.
RUNS_DIR = "runs"
#: Help of --point.
POINT = (
    "recommended, today, best (the choice), knee, a number of the front, or a configuration: "
    "'mb16 zero1'"
)

#: Keywords of `add_argument` by flag, or by what the help of a positional argument calls it.
_SHARED: dict[str, dict[str, Any]] = {
    "JOB": {"dest": "job", "nargs": "?", "help": "job file, or name of a built-in job"},
    "[JOB] KNOB=VALUE": {
        "dest": "what",
        "nargs": "*",
        "help": "job file or name; knobs to change",
    },
    "--cluster": {
        "default": "auto",
        "metavar": "NAME",
        "help": "a node such as 8xH100 or 2x4xL40S, a cluster's file or name, or auto for this "
        "machine (default: auto)",
    },
    "--space": {
        "metavar": "NAME",
        "help": "search space file or name (default: default; on several nodes and for models "
        "whose training states do not fit one device, large)",
    },
    "--today": {
        "dest": "baseline",
        "nargs": "+",
        "metavar": "FILE|KNOB=VALUE",
        "help": "what you run today: your DeepSpeed JSON and flags (default: plain data "
        "parallelism)",
    },
    "--knob": {
        "action": "append",
        "default": [],
        "metavar": "NAME=VALUE,...",
        "help": "knob of your own: 'compile=false,true' for {compile} in the command, "
        "'env:NCCL_ALGO=Ring,Tree', 'FILE.yaml:KEY=VALUE,...', 'deepspeed:KEY:int=5e7,5e8', "
        "'live:NAME=VALUE,...'; repeatable",
    },
    "--knobs": {
        "action": "append",
        "default": [],
        "metavar": "PACK|FILE",
        "help": "knobs declared together: a pack (tuner list knobs), framework for those of the "
        "recognised framework, or a TOML file; repeatable",
    },
    "--point": {
        "default": "recommended",
        "metavar": "POINT",
        "help": f"{POINT} (default: recommended)",
    },
    "--trust": {
        "action": "store_true",
        "help": "start what a driver, or a file of knobs or of a job, sets, without asking",
    },
    "--device-kind": {"metavar": "NAME", "help": "kind of device of the Ray cluster to use"},
    "--runs-dir": {"metavar": "DIR", "help": f"folder of the runs (default: ${RUNS}, else runs)"},
    "--quiet": {"action": "store_true", "help": "suppress progress output"},
}


def add_shared(parser: Any, *names: str) -> None:
    """Add arguments that several commands have, in this order.

    Args:
        names: flags, or what the help of a positional argument calls it.
    """
    for name in names:
        keywords = dict(_SHARED[name])
        if name == "--runs-dir":
            keywords["default"] = os.environ.get(RUNS) or RUNS_DIR
        if not name.startswith("-"):
            parser.add_argument(keywords.pop("dest"), metavar=name, **keywords)
        else:
            parser.add_argument(*(["-q"] if name == "--quiet" else []), name, **keywords)
