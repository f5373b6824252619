"""Public configurations of four frameworks (axolotl, LLaMA-Factory, TRL, torchtune), read by `fit`.

`python -m benchmarks.configurations --sources DIR` reads the 130 files that
`benchmarks/data/configurations.csv` names by repository and path, at the commits below, and
compares what is read of 106 with the right values. They were read of 85 by hand, nine of them of
torchtune, and of torchtune's others by PyYAML and its documented keys and defaults alone. Without
`--sources`, a folder of mirrors, the files are fetched from GitHub; they are not part of this
repository.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from benchmarks.figures import Figure, arguments, publish
from benchmarks.scripts.environment import cache_folder, checkout
from benchmarks.validation.comparison import DATA, rows_of
from tuner.search_spaces.errors import InputError
from tuner.workload.scripts.frameworks.commands import training_of_file
from tuner.workload.scripts.frameworks.training import StatedTraining

TABLE = DATA / "configurations.csv"
COMMITS = {
    "axolotl-ai-cloud/axolotl": "067b021c8b87a9e5e380b9173c704cf7340e30f5",
    "hiyouga/LLaMA-Factory": "ff6d4d12eeb035d6ce06805a5733dd7b29f2ac30",
    "huggingface/alignment-handbook": "925acdfe4b2b4e38c3dabd1851bc418f0b656351",
    "pytorch/torchtune": "bd2a0fc7c31430972728494fa01aaeeb0ebf1ba1",
}
#: Devices of the machine that is asked about.
DEVICES = 8


def values_of(training: StatedTraining) -> dict[str, str]:
    """Return what was read, by the columns of the table."""
    knobs, lora = training.knobs, training.lora
    sharding = "fsdp" if str(knobs.get("sharding", "")).startswith("fsdp") else "none"
    if stage := knobs.get("zero_stage"):
        sharding = f"zero{stage}"
    if "cpu" in (knobs.get("parameter_offload"), knobs.get("optimizer_offload")):
        sharding += "+cpu"
    return {
        "model": training.model,
        "micro_batch": str(training.micro_batch),
        "accumulation": str(training.accumulation),
        "tokens": str(training.sequence_length),
        "precision": training.precision,
        "sharding": sharding,
        "rank": str(lora.rank if lora else 0),
        "quantization": lora.quantization if lora else "none",
    }


def wrong_values(row: Mapping[str, str], training: StatedTraining) -> list[str]:
    """Return a phrase for each value that differs from the one that a person read."""
    return [
        f"{name} is {found}, not {row[name]}"
        for name, found in values_of(training).items()
        if row["model"] and found != row[name]
    ]


def main() -> None:
    parser = arguments(__doc__, "configurations")
    parser.add_argument("--sources", type=Path, metavar="DIR", help="folder of OWNER/NAME in git")
    options = parser.parse_args()
    cache = cache_folder() / "sources"
    trees = {
        repository: checkout(repository, commit, ".", cache, options.sources)
        for repository, commit in COMMITS.items()
    }
    rows = rows_of(TABLE)
    read, refused, doubted, wrong = 0, 0, 0, 0
    for row in rows:
        with contextlib.chdir(trees[row["repository"]]):
            try:
                training = training_of_file(row["path"], DEVICES)
            except InputError as error:
                refused += 1
                print(f"refused: {error}")
                wrong += bool(row["model"])
                continue
        read += 1
        doubted += bool(training.doubts)
        phrases = wrong_values(row, training)
        wrong += bool(phrases)
        for phrase in phrases:
            print(f"{row['path']}: {phrase}")
    publish(
        [
            Figure("yaml_read_wrong", wrong, "count"),
            Figure("yaml_compared", sum(bool(row["model"]) for row in rows), "count"),
            Figure("yaml_read", read, "count"),
            Figure("yaml_refused", refused, "count"),
            Figure("yaml_doubted", doubted, "count"),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
