"""A run as one zip file: the files that its answer is computed from, and its report.

`tuner show FILE.zip` reads it (`tuner.problem.run_folder`), and unpacked it is a run like any
other. A redacted one is made of a copy of the run in which names and secrets are replaced, so that
its report is computed from that copy, too.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import io
import json
import platform
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tuner.display.report import render_report
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.data_files import write_toml
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import strict_json
from tuner.search_spaces.safe_files import TemporaryFolder, archive_of, require_own, write_bytes
from tuner.study.load import answer_of_run
from tuner.workload.records.trace import read_trace
from tuner.workload.scripts.launchers import LAUNCHER_WORDS
from tuner.workload.scripts.secrets import KNOWN_TOKEN, SECRET_WORD, is_public

# Removal of names and secrets before sharing: hosts, users, paths, addresses, tokens.
#
# Of commands and variables only what is on a list stays. Other texts are changed by patterns, so a
# redacted file is to be read before it is published: a pattern finds what looks like a path or a
# token, not a project's name within a sentence. What is replaced keeps its kind and number
# ("host-2"), so that two probes on one host can still be told to be so.


#: What `Redactor` does, for help texts and for the file itself.
REDACTION = (
    "host names, user names, paths, addresses, GPU UUIDs, texts among a command's arguments and "
    "variables, and what looks like a secret are replaced; logs of failed probes are left out"
)

#: Names that say nothing of anybody.
_PUBLIC = frozenset(("", "localhost", "replay", "root", "simulated", "table", "unknown"))
#: An option or variable whose value is a secret: --hf-token X, WANDB_API_KEY=X, "password": X.
_SECRET_NAME = re.compile(rf"(?i)(?:^|[-_.]){SECRET_WORD}$")
_SECRET_OPTION = re.compile(
    rf"(?i)((?:^|[\s'\"(;?&,])-{{0,2}}(?:[\w.]+[-_.])*{SECRET_WORD}[\"']?\s*[=:]\s*|"
    rf"(?:^|\s)--?(?:[\w.]+[-_.])*{SECRET_WORD}\s+)(?!\[)(\"[^\"]*\"|'[^']*'|[^\s'\",;&]+)"
)
#: Forms of well-known tokens, and mixed strings too long to be a word of this project.
_TOKENS = re.compile(
    rf"{KNOWN_TOKEN.pattern}(?:\.[\w-]*)?|-----BEGIN[ A-Z]+-----[\s\S]*?(?:-----END[ A-Z]+-----|$)"
    r"|\b(?=[\w+=-]*[a-z])(?=[\w+=-]*[A-Z])(?=[\w+=-]*[0-9])[A-Za-z0-9+=_-]{32,}|\b[0-9a-f]{32,}\b"
)
#: Names under which the words of a command stand, and those under which variables do.
_COMMANDS = ("words", "script", "argv", "set", "read")
_VARIABLES = ("env", "assigned")
#: What stays among the words of a command: numbers, placeholders, values of knobs, launchers.
_STAYS = re.compile(
    r"[-+\d.,:eE_x]+|(?i:true|false|none|auto|cpu|cuda|full|selective|[fb]p?f?\d+|nccl|gloo)"
    rf"|python[\d.]*|\{{[^{{}}\s]*\}}|{'|'.join(map(re.escape, LAUNCHER_WORDS))}"
)
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*)://[^\s'\"<>)\],;]+", re.I)
_EMAIL = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{0,4}(?![\w:])")
_GPU = re.compile(r"\b(GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_PART = r"[^\s/'\"`:;,()\[\]{}<>|=]+"
#: An absolute path, one below a home folder, or a relative one to a file.
_PATH = re.compile(
    rf"(?<![\w/.\]-])(?:~{_PART[:-1]}*)?/(?:{_PART}/)*(?:{_PART})?"
    rf"|(?<![\w/.\]-])(?:{_PART}/)+[\w.-]+\.[A-Za-z]\w{{0,7}}\b"
)
_HOME = re.compile(r"/(?:home|Users)/([A-Za-z0-9._-]{2,})")
#: Folders of the kernel, which say how something was measured.
_KERNEL = ("/sys/", "/proc/", "/dev/shm")


class Redactor:
    """Replaces names and secrets in texts and in JSON values, alike wherever they occur.

    This machine and its user are among the names.
    """

    def __init__(self, hosts: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        self._names: dict[str, str] = {}
        self._gpus: dict[str, str] = {}
        self._add("host", (*hosts, platform.node()))
        self._add("user", users)
        with contextlib.suppress(KeyError, OSError):
            self._add("user", (getpass.getuser(),))

    def _add(self, kind: str, names: Iterable[str]) -> None:
        count = len({new for new in self._names.values() if new.startswith(f"{kind}-")})
        for name in names:
            short = name.partition(".")[0]
            if short in _PUBLIC or short in self._names or len(short) < 2 or short.isdigit():
                continue
            count += 1
            self._names |= {short: f"{kind}-{count}", name: f"{kind}-{count}"}

    def learn(self, text: str) -> None:
        """Remember the users whose home folders a text names, before texts are replaced."""
        self._add("user", _HOME.findall(text))

    def text(self, text: str) -> str:
        """Return a text without names and secrets."""
        if text.startswith("{"):  # as a model's configuration in study.toml
            with contextlib.suppress(ValueError):
                return json.dumps(self.value(json.loads(text)), sort_keys=True)
        text = _SECRET_OPTION.sub(lambda m: f"{m[1]}[secret]", text)
        text = _URL.sub(lambda m: f"{m[1]}://[url]", text)
        gpus = self._gpus
        text = _GPU.sub(lambda m: gpus.setdefault(m[0], f"{m[1]}-{len(gpus) + 1}"), text)
        text = _TOKENS.sub("[secret]", text)
        text = _EMAIL.sub("[address]", text)
        text = _IPV6.sub("[address]", _IPV4.sub("[address]", text))
        text = _PATH.sub(_without_folders, text)
        for name in sorted(self._names, key=len, reverse=True):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", self._names[name], text)
        return text

    def value(self, value: Any) -> Any:
        """Return a JSON value with every text in it redacted.

        A text under a name such as "password", or after such an option in a list of arguments, is
        replaced whole. The tail of a log is left out.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self._under(str(key), part) for key, part in value.items()}
        if isinstance(value, Sequence):
            before = ("", *value)
            return [
                "[secret]" if _names_a_secret(old) and isinstance(part, str) else self.value(part)
                for old, part in zip(before, value, strict=False)
            ]
        return value

    def _under(self, key: str, part: Any) -> Any:
        if key == "log_tail":
            return ""
        if key in _VARIABLES and isinstance(part, Mapping):
            return {
                name: self.text(text)
                if _STAYS.fullmatch(text) or is_public(name, text)
                else "[value]"
                for name, text in ((str(name), str(text)) for name, text in part.items())
            }
        if key in _COMMANDS and isinstance(part, Sequence) and not isinstance(part, str):
            words = [str(word) for word in part]
            named = 2 if words[:1] == ["-m"] else 1  # the script or its module
            return [*map(self.text, words[:named]), *map(_listed, words[named:])]
        if isinstance(part, str) and part and _SECRET_NAME.search(key):
            return "[secret]"
        return self.value(part)


def _listed(word: str) -> str:
    # The value of an argument is replaced, unless it is on the list.
    name, equals, value = word.partition("=")
    if _STAYS.fullmatch(word) or (word.startswith("-") and not equals):
        return word
    if not equals or not re.fullmatch(r"[\w.+-]+", name):
        return "".join(re.findall(r"\{\w+(?:=[^{}]*)?\}", word)) or "[value]"
    return f"{name}={value if _STAYS.fullmatch(value) else _listed(f' {value}')}"


def _names_a_secret(word: Any) -> bool:
    return isinstance(word, str) and word.startswith("-") and bool(_SECRET_NAME.search(word))


def _without_folders(match: re.Match[str]) -> str:
    path = match[0]
    if path.startswith(_KERNEL) or path == "/":
        return path
    return f"[path]/{path.rstrip('/').rpartition('/')[2]}" if path.count("/") > 1 else "[path]"


#: Files of a run beside study.toml and its trace; those after the power samples name paths.
_OF_RUN = ("trace/power/*.csv.gz", "plan.json", "table/*", "best/*")
#: Largest file of a run that is packed.
MAX_FILE_BYTES = 256 * 2**20
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the least a zip file can state: equal files make equal archives


def write_zip(run: RunFolder, out: Path | None = None, *, redact: bool = False) -> dict[str, Any]:
    """Write a run to a zip file, RUN.zip in the current folder by default; return its path, its
    sha256 and the number of its files as JSON values.
    """
    out = out or Path(f"{run.name}.zip")
    if archive_of(run.path) == out.resolve():  # with the logs that another zip file leaves out
        raise InputError(f"{out} is the run that is exported; name another file with --out")
    members = dict(_files(run, _redactor_of(run) if redact else None))
    with _copied(members, run.name) as copy:
        records = copy.records()
        members["report.html"] = render_report(answer_of_run(copy), records=records).encode()
    if out.parent.resolve().is_relative_to(run.path.resolve()):
        require_own(run.path)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            entry = zipfile.ZipInfo(f"{run.name}/{name}", _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (stat.S_IFREG | 0o600) << 16
            archive.writestr(entry, data)
    write_bytes(out, buffer.getvalue(), mode=0o600)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    return {"out": str(out), "sha256": digest, "files": len(members)}


@contextmanager
def redacted_copy(run: RunFolder) -> Iterator[RunFolder]:
    """Yield a temporary copy of a run in which names and secrets are replaced."""
    with _copied(dict(_files(run, _redactor_of(run))), run.name) as copy:
        yield copy


@contextmanager
def _copied(members: Mapping[str, bytes], name: str) -> Iterator[RunFolder]:
    with TemporaryFolder() as folder:
        for member, data in members.items():
            target = folder.path / name / member
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        yield RunFolder(folder.path / name)


def _redactor_of(run: RunFolder) -> Redactor:
    # It knows the hosts and users which the run names.
    redactor = Redactor(dict.fromkeys(record.host for record in run.records()))
    for file in (run.study_file, run.trace):
        if file.exists():
            redactor.learn(file.read_text(encoding="utf-8", errors="replace"))
    return redactor


def _files(run: RunFolder, redactor: Redactor | None) -> Iterator[tuple[str, bytes]]:
    # Tables and launch files are left out of a redacted copy, in which they would start nothing.
    study = run.read_study()
    if study is None:
        raise InputError(f"{run.path} holds no study.toml, which says what the study is about")
    patterns = ("study.toml", "trace/probes.jsonl", *_OF_RUN) if redactor is None else _OF_RUN[:1]
    if redactor is not None:
        yield "study.toml", write_toml(redactor.value(study)).encode()
        if _is_own(run, run.trace):
            records = (record.to_json() for record in read_trace(run.trace).records)
            lines = [json.dumps(redactor.value(strict_json(record))) for record in records]
            yield "trace/probes.jsonl", "".join(f"{line}\n" for line in lines).encode()
        if _is_own(run, plan := run.path / "plan.json"):
            yield "plan.json", json.dumps(redactor.value(_parsed(plan))).encode()
    for pattern in patterns:
        for path in sorted(run.path.glob(pattern)):
            if _is_own(run, path):
                yield path.relative_to(run.path).as_posix(), _read(path)


def _is_own(run: RunFolder, path: Path) -> bool:
    # By a link, even a folder's, any file of this user's could get into the zip file.
    if not path.is_file():
        return False
    if path.resolve() != run.path.resolve() / path.relative_to(run.path):
        raise InputError(f"{path} is reached by a link, which is not followed; remove it")
    return True


def _parsed(path: Path) -> Any:
    try:
        return json.loads(_read(path))
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}; remove it, or the run") from error


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{path} is larger than the limit ({MAX_FILE_BYTES // 2**20} MiB)")
    return data
