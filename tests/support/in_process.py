"""Commands of `tuner` in the process of a test."""

from __future__ import annotations

import pytest

from tuner.cli.main import main


def answered(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run `tuner` in this process: (exit code, standard output, standard error)."""
    capsys.readouterr()
    try:
        code = main([str(word) for word in words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, *capsys.readouterr()
