"""llm-analysis' predictions, run by an interpreter that imports it: JSON in, seconds out."""

from __future__ import annotations

import json
import logging
import sys

from llm_analysis.analysis import (  # type: ignore[import-not-found]
    ActivationRecomputation,
    LLMAnalysis,
)
from llm_analysis.config import (  # type: ignore[import-not-found]
    ModelConfig,
    ParallelismConfig,
    get_gpu_config_by_name,
)


def main() -> None:
    """Predict the rows on standard input; null for one that it refuses."""
    logging.disable()
    gpu = get_gpu_config_by_name("a100-sxm-80gb")
    found: list[float | None] = []
    for row in json.load(sys.stdin)["rows"]:
        model, parallelism = ModelConfig(**row["model"]), ParallelismConfig(**row["parallelism"])
        try:
            summary = LLMAnalysis(model, gpu, parallelism_config=parallelism).training(
                activation_recomputation=ActivationRecomputation.FULL, **row["training"]
            )
        except AssertionError:
            found.append(None)
        else:
            found.append(float(summary["latency_per_iter"]))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
