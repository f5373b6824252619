"""Check of the source tree before a build. Everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

LINKED = ("models", "search_spaces", "workload")

here = Path(__file__).resolve().parent
if missing := [name for name in LINKED if not (here / "tuner" / name / "__init__.py").is_file()]:
    raise SystemExit(
        f"joulefront cannot be built from this tree: tuner/{missing[0]} must be a link to "
        f"../{missing[0]}, and git wrote a text file in its place; run `git config core.symlinks "
        "true && git checkout -- tuner` (on Windows in a terminal that may create links) and "
        "build again"
    )
setup()
