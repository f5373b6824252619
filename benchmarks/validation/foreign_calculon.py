"""Calculon's predictions, run by an interpreter that imports Calculon: JSON in, seconds out.

Of each row an application and an execution as its own files state them; null if it refuses one.
"""

from __future__ import annotations

import json
import logging
import sys

from calculon import System  # type: ignore[import-not-found]
from calculon.llm import Llm  # type: ignore[import-not-found]


def main() -> None:
    """Predict the rows on standard input."""
    asked = json.load(sys.stdin)
    found: list[float | None] = []
    for row in asked["rows"]:
        system = System(asked["system"])
        try:
            model = Llm(Llm.Application(row["application"]), logging.getLogger())
            model.compile(system, Llm.Execution.from_json(row["execution"]))
            model.run(system)
            found.append(float(model.get_total_time()))
        except Llm.Error:
            found.append(None)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
