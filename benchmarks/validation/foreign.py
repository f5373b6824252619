"""Calculon on vTrain's launches, run from files of its own.

Calculon (github.com/calculon-ai/calculon, Apache-2.0) predicts by its system `a100_80g` with
vTrain's network: GPT blocks in 16 bits with plain attention and full recomputation, no overlap, and
no sharding. It knows no vocabulary and no dispatch.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.validation.vtrain import NETWORK_BPS, NODE, Launch


def calculon_s(launches: Sequence[Launch], checkout: Path) -> list[float]:
    """Return Calculon's seconds of launches; NaN where it refuses one.

    Raises:
        RuntimeError: the checkout is none, or Calculon ended otherwise.
    """
    system = json.loads((checkout / "systems" / "a100_80g.json").read_text())
    system["networks"][1]["bandwidth"] = NETWORK_BPS / 1e9
    asked = {"system": system, "rows": [_calculon_row(each) for each in launches]}
    return _answer("foreign_calculon.py", asked, checkout)


def _answer(child: str, asked: dict[str, Any], path: Path) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name(child))],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(path)},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{child} with {path} ended: {done.stderr.strip()[-300:]}")
    return [math.nan if each is None else each for each in json.loads(done.stdout)]


def _calculon_row(launch: Launch) -> dict[str, Any]:
    gpus, batch, hidden, heads, layers, sequence = launch.problem
    tensor, data, pipeline, micro_batch = launch.degrees
    off = ("weight_offload", "activations_offload", "optimizer_offload", "optimizer_sharding")
    off += ("fused_activation", "seq_par_ag_redo", "data_par_overlap")
    return {
        "application": {
            "hidden": hidden,
            "feedforward": 4 * hidden,
            "seq_size": sequence,
            "attn_heads": heads,
            "attn_size": hidden // heads,
            "num_blocks": layers,
        },
        "execution": {
            **dict.fromkeys(off, False),
            "num_procs": gpus,
            "tensor_par": tensor,
            "pipeline_par": pipeline,
            "data_par": data,
            # The network, 0 inside a node and 1 between nodes, that a group crosses.
            "tensor_par_net": int(tensor > NODE),
            "data_par_net": int(tensor * data > NODE),
            "pipeline_par_net": int(gpus > NODE),
            "batch_size": batch,
            "microbatch_size": micro_batch,
            "datatype": "float16",
            "attention_type": "multihead",
            "activation_recompute": "full",
            "pipeline_interleaving": 1,
            "tensor_par_comm_type": "ar",
            "tensor_par_overlap": "none",
            "training": True,
        },
    }
