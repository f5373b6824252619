"""Counts of the included models by transformers, as data for machines without it.

`python -m benchmarks.counted_models` counts each model of `search_spaces/data/models` and prints
which counts differ from the file; `--write` writes them to it. A test does the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tuner.search_spaces import built_model
from tuner.search_spaces.data_files import included_names
from tuner.search_spaces.library_count import key_of, run_program

DATA = Path(__file__).parents[1] / "search_spaces" / "data"
FILE = DATA / "catalogue" / "counted_models.json"


def counted(*, here: bool = False) -> list[dict[str, Any]]:
    """Return the entries of the file, counted now; `here` in this process, else in new ones."""
    entries = []
    for name in included_names("models", ".json"):
        line = (DATA / "models" / f"{name}.json").read_text(encoding="utf-8")
        config = json.loads(line)
        count = built_model.count(config) if here else run_program(json.dumps(config))
        entries.append({"name": name, "key": key_of(config), "count": count})
    return entries


def compared(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry without the release of transformers."""
    return {**entry, "count": {**entry["count"], "transformers": ""}}


def main() -> int:
    parser = argparse.ArgumentParser(description="Counts of the included models by transformers.")
    parser.add_argument("--write", action="store_true", help="write the file of counts")
    if parser.parse_args().write:
        FILE.write_text(json.dumps({"models": counted()}, indent=1) + "\n", encoding="utf-8")
        return 0
    kept = {each["name"]: compared(each) for each in json.loads(FILE.read_text())["models"]}
    differing = [each["name"] for each in counted() if kept.get(each["name"]) != compared(each)]
    print(f"counts that differ: {', '.join(differing) or 'none'}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
