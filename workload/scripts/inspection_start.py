"""Start of a user's script that is only looked at: under the hook, until its first step.

If DeepSpeed's configuration allows it, the micro-batch is halved (or doubled) and the accumulation
adapted, so that the size of the first batch shows if the script follows DeepSpeed or makes its
batches itself.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.safe_files import write_text
from tuner.workload.hook import merge, split_differently
from tuner.workload.scripts.script_job import ScriptJob, Start


def inspection_start(
    job: ScriptJob, configuration: Configuration, folder: Path, *, alter: bool
) -> Start:
    """Write the files of a look at `job` to `folder`, and return the start of its ranks."""
    start = job.start(configuration, folder)
    options = {**start.options, "inspect": True, "alter": False}
    if alter and "micro_batch" not in job.placeholders:
        other = split_differently(start.config, configuration.data_parallel)
        if other:  # in the file too: the script may read it by itself
            config = merge(start.config, other)
            write_text(folder / "ds_config.json", json.dumps(config))
            options["deepspeed"] = {**start.options["deepspeed"], **other}
        options["alter"] = not start.config
    return replace(start, options=options)
