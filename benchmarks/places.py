"""Places of a change: how many files of the product name one existing example of it.

Thirteen changes are listed that a successor makes: a limit, a failure class, a column and so on.
For each, one example that exists today is followed: the files of the product that name it in code
are counted, since a second one of its kind would have to be named there, too. Files are the modules
of the import package without `tuner.testing`, and its TOML, JavaScript, CSS and HTML files. In
Python a name counts as an identifier or as a word of a string, not in comments and docstrings;
elsewhere as a word anywhere. A file that holds the example under another name is missed, and one
that names it for another reason is counted: the figure is a measure to be compared with itself.
An example that no file names any more is an error, so that renaming one does not pass for progress.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from functools import cache

from benchmarks.figures import ROOT

#: The example of each change: the names by which files refer to it.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "limit": ("budget_kJ",),
    "failure": ("out_of_memory",),
    "column": ("p_nondominated",),
    "figure": ("hypervolume_figure",),
    "framework": ("torchtitan",),
    "launcher": ("srun",),
    "executor": ("ray", "RayExecutor"),
    "meter": ("nvml", "pynvml", "NvmlMeter"),
    "option": ("allow_changed_training",),
    "stop_rule": ("not_worth_it", "max_regret"),
    "recommendation": ("decide", "decide_likely"),
    "acquisition": ("AnswerAcquisition",),
    "knob": ("pipeline_schedule",),
}

FOLDERS = ("search_spaces", "workload", "models", "tuner")
SUFFIXES = (".py", ".toml", ".js", ".css", ".html")
_WORD = re.compile(r"[A-Za-z_][\w-]*")
#: Tokens whose text counts in Python; from 3.12 on the text of an f-string is a token of its own.
_TEXT = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))


def named_words(text: str, suffix: str) -> set[str]:
    """Return the words that a file names: in Python those of its code alone."""
    if suffix != ".py":
        return set(_WORD.findall(text))
    docstrings = {
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    words: set[str] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            words.add(token.string)
        elif token.type in _TEXT and token.start[0] not in docstrings:
            words.update(_WORD.findall(token.string))
    return words


@cache
def _product() -> dict[str, frozenset[str]]:
    """Return the words of every file of the product, by path below the repository."""
    paths = {
        path.resolve()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SUFFIXES and path.is_file()
    }
    relative = {path: path.relative_to(ROOT) for path in paths}
    return {
        str(name): frozenset(named_words(path.read_text(encoding="utf-8"), path.suffix))
        for path, name in relative.items()
        if name.parts[:2] != ("tuner", "testing")
    }


def places() -> dict[str, list[str]]:
    """Return the files that name the example of each change.

    Raises:
        LookupError: no file names an example, so its successor has to be listed here.
    """
    found = {}
    for change, names in EXAMPLES.items():
        files = sorted(path for path, words in _product().items() if words.intersection(names))
        if not files:
            raise LookupError(f"no file names {' or '.join(names)}, the example of a {change}")
        found[change] = files
    return found
