"""Check of the source tree before a build, and the parts of it that no wheel holds.

Everything else is in pyproject.toml.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

LINKED = ("models", "search_spaces", "workload")
#: Modules of `tuner.testing` for users; the others serve the tests and benchmarks of the
#: repository, and MANIFEST.in keeps them in the source archive.
FOR_USERS = ("__init__", "meters")


class BuildModules(build_py):
    """A build without the fakes of this repository's own tests."""

    def find_package_modules(self, package, package_dir):
        found = super().find_package_modules(package, package_dir)
        if package != "tuner.testing":
            return found
        return [module for module in found if module[1] in FOR_USERS]


here = Path(__file__).resolve().parent
if missing := [name for name in LINKED if not (here / "tuner" / name / "__init__.py").is_file()]:
    raise SystemExit(
        f"joulefront cannot be built from this tree: tuner/{missing[0]} must be a link to "
        f"../{missing[0]}, and git wrote a text file in its place; run `git config core.symlinks "
        "true && git checkout -- tuner` (on Windows in a terminal that may create links) and "
        "build again"
    )
setup(cmdclass={"build_py": BuildModules})
