"""Modules that no package holds, such as scripts of CI and examples, loaded by their paths."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def module_at(path: Path, name: str = "") -> ModuleType:
    """Return a new module of the file; its name is the file's if none is given."""
    name = name or path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses looks for it there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
    return module
