"""Names, docstrings and messages that are not written as engineers write them.

Patterns: a clause where a noun belongs ("Return what ..."), speech where data belongs (`told`,
`said`, `asked`), "is no X" for "is not a valid X", an adverb or a participle as the name of a class
or module, and a relative pronoun far from its noun ("of it."). Bound names, first paragraphs of
docstrings and messages are searched by word; one comment over several constants cannot be found
that way.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.figures import ROOT
from benchmarks.source import Definition, Module, production

#: Clauses as names: `what_starts`, `who_holds`.
CLAUSES = re.compile("what(ever)?|which|who(m|se|ever)?|nobody")
#: Speech as names.
SPEECH = re.compile(
    "tells?|told|say(s|ing)?|said|ask(s|ed|ing)?|answer(s|ed|ing)?|look(s|ed)?|knows?|hears?|heard|"
    "speaks?"
)
#: A participle that names nothing without a noun; in `known_errors` it is an adjective.
BARE = re.compile("known")
#: Adverbs, adjectives and irregular participles that are not names of classes or modules.
ADVERBS = re.compile(
    "above|alone|below|beside|both|drawn|driven|earlier|elsewhere|found|given|held|kept|later|lost|"
    "missing|more|most|off?|own|seen|shown|spent|today|when|which"
)
#: Nouns that end like participles.
NOUNS = re.compile("(deep)?speed|[fns]eed")

#: Bound names that stay, with the reason.
ALLOWED_NAMES = {
    "parse_known_args": "overrides argparse",
    "answered": "method of callbacks that users write",
    "_batch_known": "name of a rule in knobs.toml",
    "tells_clocks": "field of MeterInfo, which records and users' own meters hold",
    "_NOBODY_UID": "nobody is the name of the account",
    "FIRST_LOOK_S": "looks at the data: the term of sequential tests",
    "next_look_s": "looks at the data: the term of sequential tests",
    "LOOK_FACTOR": "looks at the data: the term of sequential tests",
    "LOOK_RISK": "looks at the data: the term of sequential tests",
}
#: Modules with a field `what`, the key of users' files of knobs, spaces and drivers, of tables of
#: data, and of the guard's messages.
WHAT_MODULES = (
    *("knobs", "knob_declarations", "space", "driver", "model", "catalog", "own_guard"),
)
#: Packages in which `answer` is the term of docs/words.md: what a study found.
ANSWER_PACKAGES = (*("search", "answer", "study", "problem", "display", "deploy", "cli"),)
#: Modules and classes that stay, with the reason.
ALLOWED_ADVERBS = {
    "Today": "the term of docs/words.md for the configuration in use",
    "today": "the term of docs/words.md for the configuration in use",
    "_Today": "the term of docs/words.md for the configuration in use",
}

#: Patterns of sentences, by what is wrong.
SENTENCES = {
    "clause for a noun": re.compile(
        r"\bwhat\b(?!-if)|\bwhoever\b|\bnobody\b|\bwhich of (?:them|these|those)\b"
        r"|\A(?:Which|Whether|How|Why|Where|Who|Whose)\b",
        re.IGNORECASE | re.ASCII,
    ),
    "speech for data": re.compile(
        r"\b(?:tells?|told|telling|says?|said|saying|asks|asked|hears?|heard)\b", re.IGNORECASE
    ),
    "is no X": re.compile(
        r"(?<![Tt]here )\b(?:is|are) no (?!longer\b|more\b|less\b|fewer\b|other\b)[a-z]"
    ),
    "pronoun far from its noun": re.compile(r"\b(?:of it|as of|of this)(?=[.,;:)]|$)"),
}
#: In messages only this is searched.
MESSAGES = ("is no X",)


@dataclass(frozen=True)
class Match:
    """A name, docstring or message that matches a pattern.

    Attributes:
        kind: "name", "docstring" or "message".
        pattern: what is wrong with it.
        place: file and line.
        text: the name or sentence.
    """

    kind: str
    pattern: str
    place: str
    text: str


def _words(name: str) -> list[str]:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_")


def _name_pattern(name: str, package: str) -> str:
    """Return the pattern that a bound name matches; empty if none."""
    if name in ALLOWED_NAMES:
        return ""
    words = _words(name)
    if any(CLAUSES.fullmatch(word) for word in words):
        return "clause for a noun"
    spoken = {word for word in words if SPEECH.fullmatch(word)}
    if package in ANSWER_PACKAGES:
        spoken -= {"answer", "answers"}
    if spoken or BARE.fullmatch(words[-1]):
        return "speech for data"
    return ""


def _is_adverb(name: str) -> bool:
    """Return whether the name of a class or module is an adverb or a participle."""
    if name in ALLOWED_ADVERBS:
        return False
    last = _words(name)[-1]
    if ADVERBS.fullmatch(last):
        return True
    return last.endswith("ed") and not NOUNS.fullmatch(last)


def _bound(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name that a module binds, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno


def _is_exception(node: ast.ClassDef) -> bool:
    """Return whether a class is an exception, whose name may say what happened."""
    bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    return any(
        re.search(r"(Error|Exception|Failed|Exit|Interrupt|Refused)$", base) for base in bases
    )


def _names(module: Module, file: str) -> Iterator[Match]:
    stem = module.path.stem
    if stem != "__init__" and _is_adverb(stem):
        yield Match("name", "adverb or participle", f"{file}:1", stem)
    for name, line in _bound(module.tree):
        if name == "what" and stem in WHAT_MODULES:
            continue
        if pattern := _name_pattern(name, module.layer):
            yield Match("name", pattern, f"{file}:{line}", name)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and not _is_exception(node) and _is_adverb(node.name):
            yield Match("name", "adverb or participle", f"{file}:{node.lineno}", node.name)


def _docstrings(module: Module, file: str) -> Iterator[Match]:
    for node in ast.walk(module.tree):
        if not isinstance(node, Definition | ast.Module):
            continue
        first = (ast.get_docstring(node) or "").partition("\n\n")[0]
        text = " ".join(re.sub(r"``?[^`]*``?|\"[^\"]*\"", "...", first).split())
        for pattern, searched in SENTENCES.items():
            if searched.search(text):
                line = node.body[0].lineno
                yield Match("docstring", pattern, f"{file}:{line}", " ".join(first.split()))
                break


def _messages(module: Module, file: str) -> Iterator[Match]:
    documented = {
        id(node.body[0].value)
        for node in ast.walk(module.tree)
        if isinstance(node, Definition | ast.Module)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if id(node) not in documented:
            for pattern in MESSAGES:
                if SENTENCES[pattern].search(node.value):
                    yield Match("message", pattern, f"{file}:{node.lineno}", node.value)


def matches(modules: Iterable[Module]) -> list[Match]:
    """Return the names, docstrings and messages of modules that match a pattern."""
    found: list[Match] = []
    for module in modules:
        path = module.path
        file = str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
        for search in (_names, _docstrings, _messages):
            found += search(module, file)
    return found


if __name__ == "__main__":
    for match in matches(production()):
        print(f"{match.kind:9} {match.place}  {match.pattern}: {match.text}")
