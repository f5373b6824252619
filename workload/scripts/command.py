"""A user's command: its words, their placeholders, and the start of its ranks.

`{micro_batch}` and the like may stand where a script owns a flag; `{micro_batch=8}` also says
today's value. `Script` is what the user names, `Start` what the ranks of one configuration get.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Protocol

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.fields import Checked, option, whole_number
from tuner.search_spaces.knob_declarations import Knob
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.plugins import not_installed
from tuner.search_spaces.safe_files import read_text
from tuner.workload.hook.attachment import program_words
from tuner.workload.scripts import SOCKET
from tuner.workload.scripts.script_facts import ASSIGNMENT, LAUNCH, PLACEHOLDER, Framework, Launcher
from tuner.workload.scripts.secrets import hidden, revealed

# An observed launch: the user's command, started once exactly as it stands.
#
# Nothing of the command is read to start it. What its ranks report (their words, folder, variables,
# number, and the counts of their first steps) says what the user trains today, and whether ranks
# can be started one by one from what they reported.


#: Variables by which launchers number ranks, and what they depend on: an agent sets its own.
_NUMBERS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|ROLE_NAME)|LOCAL_SIZE|CROSS_(RANK|SIZE)"
    r"|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|TORCH_NCCL_ASYNC_ERROR_HANDLING|NODE_RANK"
    r"|CUDA_VISIBLE_DEVICES|_|SHLVL|PWD|OLDPWD|LINES|COLUMNS|BASH_FUNC_\w+%%|KMP_\w+_REGISTER\w*"
)
#: The number of a rank in a word that differs from rank to rank.
_LOCAL_RANK = re.compile(r"(--local[-_]rank=)\d+")


@dataclass(frozen=True)
class Observation:
    """Facts observed in one launch of a command.

    Attributes:
        words: of a rank, without the interpreter; `{local_rank}` stands for its number.
        folder: that it was started in.
        ranks: their number.
        variables: what the command adds to the environment of its ranks.
        threads, cores: of a rank.
        imports: packages that take long to import, which its ranks have imported.
        why_as_it_stands: why ranks cannot be started from their words, a phrase; "" if they can.
    """

    words: tuple[str, ...]
    folder: str
    ranks: int
    variables: Mapping[str, str] = field(default_factory=dict)
    threads: int = 0
    cores: int = 0
    imports: tuple[str, ...] = ()
    why_as_it_stands: str = ""

    @classmethod
    def of(cls, processes: Sequence[Mapping[str, Any]]) -> Observation:
        """Return the facts from the descriptions of all ranks, in their order."""
        first = processes[0]
        typed = program_words(first["words"])
        words = tuple(_LOCAL_RANK.sub(r"\1{local_rank}", word) for word in typed)
        why = _why_as_it_stands(processes, words)
        if why and not _is_program(words) and first["program"].get("words"):
            words = program_words(first["program"]["words"])  # which started the ranks
        variables = {
            name: value
            for name, value in first["variables"].items()
            if not _NUMBERS.fullmatch(name)
            and all(each["variables"].get(name) == value for each in processes)
        }
        return cls(
            words,
            str(first["cwd"]),
            len(processes),
            variables,
            int(first["threads"]),
            int(first["cores"]),
            tuple(first["imports"]),
            why,
        )

    def launcher(self, read: Launcher | None) -> tuple[Launcher | None, dict[str, str]]:
        """Return the launcher as it was observed, and the values that are not kept.

        Args:
            read: what the parser makes of the command; None if it cannot read it.
        """
        variables = {
            name: value
            for name, value in self.variables.items()
            if read is None or name not in read.env
        }
        texts, secrets = hidden([f"{name}={value}" for name, value in variables.items()])
        env = dict(text.split("=", 1) for text in texts)
        if read is None:
            if self.ranks == 1 and not env:
                return None, {}
            read = Launcher("", script=self.words, processes=self.ranks)
        env = {**{n: text for n, text in read.env.items() if n in self.variables}, **env}
        kept = {n: text for n, text in read.env.items() if "{" in text}
        return replace(read, env={**kept, **env}, processes=self.ranks, nodes=1), secrets

    def placed(self, typed: str, filled: str) -> tuple[str, ...]:
        """Return the words of a rank with the placeholders of the command that typed them."""
        with_names, with_values = shlex.split(typed), shlex.split(filled)
        words = list(self.words)
        match = SequenceMatcher(None, with_values, words, autojunk=False)
        for at, position, size in match.get_matching_blocks():
            for offset in range(size):
                if PLACEHOLDER.search(with_names[at + offset]):
                    words[position + offset] = with_names[at + offset]
        return tuple(words)


def _is_program(words: Sequence[str]) -> bool:
    text = " ".join(words[:2])
    return bool(words) and "multiprocessing" not in text and "default_worker.py" not in text


def _why_as_it_stands(processes: Sequence[Mapping[str, Any]], words: tuple[str, ...]) -> str:
    if not words or words[0] == "-":
        return "its ranks run code that is in no file"
    if any("multiprocessing" in " ".join(each["words"]) for each in processes):
        return "the script starts its ranks itself, by multiprocessing"
    if Path(words[0]).name == "default_worker.py":
        return "Ray starts its ranks"
    if words[0] == "-c":
        return "its ranks run code that is in no file"
    if len(processes) > 1 and any("RANK" not in each["variables"] for each in processes):
        return "the script starts its ranks itself"
    if (
        len({tuple(_LOCAL_RANK.sub("", word) for word in each["words"][1:]) for each in processes})
        > 1
    ):
        return "its ranks have different arguments"
    path = Path(processes[0]["cwd"]) / words[0]
    if words[0] != "-m" and not path.is_file():
        return f"there is no script {words[0]} in {processes[0]['cwd']}"
    other = next((each["prefix"] for each in processes if each["prefix"] != sys.prefix), "")
    return f"it runs in another Python environment ({other})" if other else ""


#: What a command may hold beside the launch knobs. The last three differ from rank to rank.
_EXTRA = ("gradient_accumulation", "deepspeed_config", "world_size", "rank", "local_rank")
#: Frameworks that take long to import, and the modules of theirs that training needs.
_FRAMEWORKS = {
    "accelerate": ("accelerate",),
    "datasets": ("datasets",),
    "lightning": ("lightning", "lightning.pytorch"),
    "pytorch_lightning": ("pytorch_lightning",),
    "transformers": ("accelerate", "transformers.trainer"),
}


#: Placeholder in a line for the shell, in which `${NAME}` is a variable.
_PLACED = re.compile(rf"(?<!\$){PLACEHOLDER.pattern}")
PYTHON = re.compile(r"python[\d.]*")
_IMPORTS = re.compile(r"^\s*(?:import|from)\s+(\w+)", re.M)
#: `"RANK" in os.environ`, `os.environ.get("RANK")`, `os.getenv("RANK", -1)`.
_HAS_RANK = re.compile(
    r"""(["'])RANK\1 (?:not )?in os\.environ"""
    r"""|(?:environ\.get|getenv)\((["'])RANK\2(?:, *(?:-1|None))?\)"""
)


def imported_frameworks(words: Sequence[str], cwd: str | Path) -> tuple[str, ...]:
    """Return the frameworks among a script's own import lines, worth importing once for all."""
    named = _IMPORTS.findall(_source(words, cwd))
    modules = [module for name in named for module in _FRAMEWORKS.get(name, ())]
    return tuple(dict.fromkeys(modules))


def names_a_rank(words: Sequence[str], cwd: str | Path) -> bool:
    """Return True if a script checks for a rank, and trains in one process without.

    Under DeepSpeed it may need one: without, DeepSpeed looks for MPI's.
    """
    text = _source(words, cwd)
    return bool(_HAS_RANK.search(text)) and "deepspeed" not in _IMPORTS.findall(text)


def meets_on_gpus_alone(words: Sequence[str], cwd: str | Path) -> bool:
    """Return True if a script names NCCL for its process group, and no backend of cores."""
    try:
        tree = ast.parse(_source(words, cwd))
    except (SyntaxError, ValueError):
        return False
    texts = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    others = [text for text in (*texts, *words) if re.search(r"\b(gloo|mpi)\b", text)]
    return "nccl" in texts and not others


#: Words of code by which ranks meet: of torch, and of the libraries that do it for a program.
_MEETING = re.compile(
    r"process_group|distributed|\bdist\b|accelerat|lightning|fabric|deepspeed|horovod|fsdp"
    r"|\bDDP\b|Trainer|\bray\b|nccl|gloo|\bmpi\b",
    re.IGNORECASE,
)
#: Packages that make no process group by themselves, beside Python's own modules.
_PLAIN = re.compile(
    r"torch(vision|audio)?|numpy|scipy|pandas|sklearn|matplotlib|seaborn|PIL|cv2|tqdm|yaml|h5py"
    r"|einops|datasets|tokenizers|tiktoken|sentencepiece|fire|click|absl|nltk|requests|six|attr"
    r"|tensorboard(X)?|wandb"
)
#: Files of a script's own beyond which it is not said what they do.
_MOST_FILES = 100


def meets_nowhere(words: Sequence[str], cwd: str | Path) -> bool:
    """Return True if a script certainly makes no process group of several ranks.

    No word of it speaks of one, nor of the modules beside it that it imports, and it imports
    nothing else but plain packages (`_PLAIN`). Of files that cannot be read nothing is certain.
    """
    text = _source(words, cwd)
    if not text:
        return False
    folder, seen, left = (Path(cwd) / words[0]).resolve().parent, set[Path](), [text]
    while left:
        text = left.pop()
        try:
            names = _imported(ast.parse(text))
        except (SyntaxError, ValueError, RecursionError):
            return False
        if _MEETING.search(text) or "importlib" in text or len(seen) > _MOST_FILES:
            return False
        for name in names:
            inside = _own_files(folder, name)
            if not inside and not (_PLAIN.fullmatch(name) or name in sys.stdlib_module_names):
                return False
            new = [file for file in inside if file not in seen]
            seen.update(new)
            try:
                left += map(read_text, new)
            except (OSError, ValueError):
                return False
    return True


def _imported(tree: ast.AST) -> set[str]:
    # First names of what is imported, but for what a package imports of itself.
    found = [[each.name for each in n.names] for n in ast.walk(tree) if isinstance(n, ast.Import)]
    found += [
        [n.module]
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and n.module and not n.level
    ]
    return {name.partition(".")[0] for names in found for name in names}


def _own_files(folder: Path, name: str) -> list[Path]:
    module, package = folder / f"{name}.py", folder / name
    if module.is_file():
        return [module]
    return list(islice(package.rglob("*.py"), _MOST_FILES + 1)) if package.is_dir() else []


def _source(words: Sequence[str], cwd: str | Path) -> str:
    return "" if words[:1] in ((), ("-m",)) else source_of(words, Path(cwd))


def search_path(cwd: Path, words: Sequence[str]) -> tuple[Path, ...]:
    """Return the folders from which a script imports: its own, the current one, Python's."""
    own = [] if not words or words[0] == "-m" else [(cwd / words[0]).resolve().parent]
    folders = [*own, cwd, *(Path(entry) for entry in sys.path if entry)]
    return tuple(dict.fromkeys(folders))


def source_of(words: Sequence[str], cwd: Path) -> str:
    """Return the text of the script or module of a command; "" if it cannot be read."""
    paths = [cwd / words[0]]
    if words[0] == "-m":
        module = Path(*words[1].split("."))
        paths = [folder / module.with_suffix(".py") for folder in search_path(cwd, words)]
        paths += [folder / module / "__main__.py" for folder in search_path(cwd, words)]
    for path in paths:
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                return ""
    return ""


def filled(word: str, values: Mapping[str, str]) -> str:
    """Return the word with the placeholders in `values` filled in."""
    return PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), word)


def assignments(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split off the variables in front of a command; InputError if `env` has an option."""
    rest = list(words)
    if rest and Path(rest[0]).name == "env":
        rest = rest[1:]
        if rest and rest[0].startswith("-"):
            raise InputError(f"env {rest[0]} is not read; write NAME=VALUE before the command")
    assigned = {}
    while rest and (found := ASSIGNMENT.fullmatch(rest[0])):
        assigned[found[1]] = found[2]
        rest = rest[1:]
    return assigned, rest


def without_python(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command without its leading Python."""
    rest = list(words)
    while rest and PYTHON.fullmatch(Path(rest[0]).name):
        rest = rest[1:]
        while rest and rest[0] in ("-u", "-B", "-O"):
            rest = rest[1:]
    return tuple(rest)


def read_command(words: Sequence[str], cwd: Path) -> tuple[tuple[str, ...], Launcher | None]:
    """Return the words that each rank runs, without the interpreter, and the launcher if any."""
    assigned, rest = assignments(words)
    require_visible_devices(assigned)
    script, launcher = read_words(rest, cwd, {**os.environ, **assigned})
    if launcher is None:
        if not assigned:
            return script, None
        launcher = Launcher("", (), script)
    return script, replace(launcher, env={**assigned, **launcher.env}, assigned=assigned)


def read_words(
    words: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> tuple[tuple[str, ...], Launcher | None]:
    """Return the same of a command without variables in front.

    A command that a package installs is its module: `litgpt pretrain` is started as
    `python -m litgpt pretrain`.
    """
    if (launchers := SOCKET.part("launchers")) is not None:
        found: tuple[tuple[str, ...], Launcher] | None = launchers.launched(words, cwd, environment)
        if found is not None:
            return found
    bare = without_python(words)
    return (_as_module(bare, cwd) if len(bare) == len(words) else bare), None


def _as_module(words: Sequence[str], cwd: Path) -> tuple[str, ...]:
    name = words[0] if words else ""
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("-") or (cwd / name).is_file():
        return tuple(words)
    (*_, entry) = (None, *importlib.metadata.entry_points(group="console_scripts", name=name))
    if entry is None:
        return tuple(words)
    return ("-m", entry.module.removesuffix(".__main__"), *words[1:])


def require_visible_devices(variables: Mapping[str, str]) -> None:
    """Raise InputError if the variables of a command hide GPUs that the meter would count."""
    if (visible := variables.get("CUDA_VISIBLE_DEVICES")) is not None:
        raise InputError(
            "CUDA_VISIBLE_DEVICES goes before tuner, whose meter must see the same GPUs: "
            f"CUDA_VISIBLE_DEVICES={visible} tuner ..."
        )


class ShellScript(Protocol):
    """Script of the shell that a command starts; `command` is the line that runs it here."""

    @property
    def path(self) -> Path: ...

    @property
    def command(self) -> str: ...

    def lines(self) -> list[str]:
        """Return its lines; none if it cannot be read."""
        ...

    def differences(self, cluster: Cluster) -> str:
        """Return how what it asks for differs from the machines here, one sentence, or ""."""
        ...

    def ran(self, log: Path, ranks_began_s: float, first_step_s: float) -> str:
        """Return which of its lines started the ranks, a sentence, or "" if that is unknown."""
        ...


@dataclass(frozen=True)
class Script(Checked):
    """Script as the user names it, its command as one shell line.

    joulefront starts the ranks that a launcher in front of it would start. `{NAME}` or
    `{NAME=VALUE}` stands where the script takes a knob; VALUE is today's.
    """

    command: str
    cwd: Path = field(default_factory=Path.cwd)
    steps: int | None = option(None, "optimizer steps of the whole training", least=1)
    global_batch: int | None = option(
        None, "samples per optimizer step, if DeepSpeed's configuration does not give it", least=1
    )
    sequence_length: int | None = option(
        None, "tokens per sample, if the first batch does not show it", least=1
    )
    nodes: int | None = option(
        None,
        "nodes that it runs on today, through --ray (default: all usable ones)",
        least=1,
    )
    model_config: Path | None = option(
        None, "Hugging Face config.json, if the model does not carry its own", metavar="FILE"
    )
    framework: Path | None = option(
        None,
        "driver of its framework (default: recognised; see tuner list frameworks)",
        metavar="FILE",
    )
    knobs: tuple[Knob, ...] = ()
    observation: Observation | None = field(default=None, repr=False, compare=False)
    #: Folder that an observed command was typed in; `cwd` is then that of its ranks.
    typed_in: str = ""

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The words that each rank runs, without the interpreter or a launcher.

        InputError if there is no script, its launcher cannot be read, or a placeholder is unknown.
        """
        words = self._read[0]
        if self.observation is not None:
            return words
        if not words:
            raise InputError('a script needs a command, e.g. --script "train.py --data DIR"')
        if words[0] == "-m":
            if len(words) == 1:
                raise InputError("-m must be followed by a module's name")
        elif Path(words[0]).name in ("bash", "sh", "zsh", "dash") or words[0].endswith(".sh"):
            raise InputError("shell scripts are not read: give the python or torchrun line in it")
        elif not (self.cwd / words[0]).is_file():
            if SOCKET.part("launchers") is None and shutil.which(words[0]):
                raise not_installed(f"reading the launcher {words[0]!r}")
            raise InputError(f"there is no script {words[0]!r} in {self.cwd}")
        self._check_placeholders(" ".join(words))
        return words

    def _check_placeholders(self, text: str, *, in_shell: bool = False) -> None:
        # In a line for the shell, braces around an unknown name are the shell's, or awk's.
        declared = [knob.name for knob in self.knobs]
        stated: dict[str, str] = {}
        for name, value in _PLACED.findall(text):
            if value and stated.setdefault(name, value) != value:
                raise InputError(
                    f"{{{name}}} is {stated[name]} and {value} in one command; give it one value, "
                    "and write the number itself where it shall not be changed"
                )
            if name not in (*LAUNCH, *_EXTRA, *declared):
                if in_shell and not value:
                    continue
                hint = f"or any name whose values are declared, --knob '{name}=VALUE,VALUE'"
                raise UnknownName("placeholder", name, (*LAUNCH, *_EXTRA, *declared, hint))
            if value and name in LAUNCH:
                number = whole_number(value)
                KNOBS[name].check(value if number is None else number)

    def require_startable(self) -> None:
        """Raise InputError for a command that cannot be started as it stands."""
        if not self._kept[0]:
            raise InputError('a script needs a command, e.g. --script "python train.py --data DIR"')
        if self._file is not None and not self._file.is_file():
            raise InputError(f"there is no script {self._kept[0][0]!r} in {self.cwd}")
        self._check_placeholders(self.line, in_shell=self._for_shell)
        words = self._kept[0]
        if words[:1] != ["env"] or not words[1:2] or not words[1].startswith("-"):
            require_visible_devices(assignments(words)[0])  # options of env are run, not read

    @property
    def request_fields(self) -> dict[str, Any]:
        """The fields of a request that hold the tuned training."""
        return {"job": None, "script": self}

    def observed(self, observation: Observation) -> Script:
        """Return this script as its ranks were seen to start."""
        folder = str(Path(self.cwd).resolve())
        return replace(self, observation=observation, typed_in=folder, cwd=Path(observation.folder))

    def stating(self, words: Sequence[str]) -> Script:
        """Return this script with NAME=VALUE as today's value of the bare placeholder {NAME}."""
        command = self.command
        for name, _, value in (word.partition("=") for word in words):
            command = command.replace(f"{{{name}}}", f"{{{name}={value}}}") if value else command
        return replace(self, command=command)

    @property
    def launcher(self) -> Launcher | None:
        """The launcher in front of the script, or None; InputError if it cannot be honoured."""
        return self._read[1]

    @cached_property
    def framework_of_command(self) -> Framework | None:
        """The framework of the command and the keys that its installed version lacks, or None."""
        if (frameworks := SOCKET.part("framework")) is None and self.framework is None:
            return None
        frameworks = frameworks or SOCKET.needed("framework", "--framework")
        launcher = self.launcher.kind if self.launcher else ""
        found: Framework | None = frameworks.recognised(
            self.words, Path(self.cwd), launcher, self.framework
        )
        return found

    @property
    def framework_knobs(self) -> tuple[Knob, ...]:
        """Knobs that the framework's driver declares; InputError if none is recognised."""
        found = self.framework_of_command
        if found is None:
            raise InputError(
                f"no framework is recognised in {self.shown!r}, so --knobs framework has none "
                "(tuner list frameworks)"
            )
        return tuple(found.declared.values())

    @cached_property
    def _kept(self) -> tuple[list[str], dict[str, str]]:
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise InputError(f"the script's command cannot be read: {error}") from error
        if self._for_shell:  # of which only what looks like a secret is not kept
            return words, hidden(["", *self._parts])[1]
        return hidden(words, {knob.target[1] for knob in self.knobs if knob.target[0] == "env"})

    @cached_property
    def _parts(self) -> list[str]:
        parts = shlex.shlex(self.command, posix=True, punctuation_chars=True)
        parts.whitespace_split = True
        return [*parts]

    @property
    def _for_shell(self) -> bool:
        # Pipes, redirections and several commands are the shell's to read, unless they are quoted.
        words = shlex.split(self.command)
        if shlex.join(words) == self.command.strip():
            return False
        signs = any(part and not set(part) - set("();<>|&") for part in self._parts)
        return signs or self._parts != words or "\n" in self.command.strip()

    @cached_property
    def _read(self) -> tuple[tuple[str, ...], Launcher | None]:
        if self.observation is not None:
            return self._observed[:2]
        return read_command(self._kept[0], Path(self.cwd))

    @cached_property
    def _observed(self) -> tuple[tuple[str, ...], Launcher | None, dict[str, str]]:
        assert self.observation is not None
        launcher, secrets = self.observation.launcher(self.read_launcher)
        words, hidden_values = hidden(self.observation.placed(self.line, self.filled))
        return tuple(words), launcher, {**secrets, **hidden_values}

    @property
    def shown(self) -> str:
        """The command without the values of its secrets; InputError if it cannot be read."""
        return self.line if self._for_shell else shlex.join(self._kept[0])

    @property
    def secrets(self) -> Mapping[str, str]:
        """The values that are not kept, by the variables that stand for them."""
        observed = self._observed[2] if self.observation is not None else {}
        return {**self._kept[1], **observed}

    @property
    def line(self) -> str:
        """The command as a line for the shell, in which `{env:NAME}` stands for each secret."""
        line = self.job_script.command if self.job_script is not None else self.command
        if self._file is not None and not os.access(self._file, os.X_OK):
            own = Path(sys.executable).parent
            named = Path(shutil.which("python") or "").parent == own
            line = f"{'python' if named else sys.executable} {line}"
        for name, value in self._kept[1].items():
            line = line.replace(value, f"{{env:{name}}}")
        return line

    @cached_property
    def job_script(self) -> ShellScript | None:
        """The script of the shell that the command starts, or None."""
        if self._for_shell or (reader := SOCKET.part("job script")) is None:
            return None
        found: ShellScript | None = reader.JobScript.of(self._kept[0], Path(self.cwd))
        return found

    @property
    def _file(self) -> Path | None:
        # The script, if it stands alone without an interpreter.
        first = next(iter(self._kept[0]), "")
        return Path(self.cwd, first) if first.endswith(".py") else None

    @cached_property
    def filled(self) -> str:
        """The line with today's values in place of its placeholders, each of which has one."""
        return _PLACED.sub(lambda found: self._today_of(found) or found[0], self.line)

    def _today_of(self, found: re.Match[str]) -> str:
        stated = {k.name: str(k.native(k.baseline)) for k in self.knobs if k.baseline is not None}
        return found[2] or stated.get(found[1], "")

    @property
    def observable(self) -> bool:
        """True if the command can be started as it stands: each placeholder has today's value.

        A command that names a rank is made for the start of single ranks.
        """
        placeholder_names = {*LAUNCH, *_EXTRA, *(knob.name for knob in self.knobs)}
        found = [each for each in _PLACED.finditer(self.line) if each[1] in placeholder_names]
        ranks = {"rank", "local_rank", "world_size"}
        return all(self._today_of(each) and each[1] not in ranks for each in found)

    @property
    def name(self) -> str:
        """The name of the script's file or module; before it is observed, of a word like one."""
        if self.observation is not None and self.words[:1] in ((), ("-",), ("-c",)):
            return replace(self, observation=None).name
        if self.observation is None and self.observable:
            words = self._kept[0]
            modules = [after for word, after in pairwise(words) if word == "-m"]
            files = [word for word in words if word.endswith(".py")]
            if modules and not files:  # the dots of its name are no suffix
                return modules[0]
            return Path((files or words or ["command"])[0]).stem
        return self.words[1] if self.words[0] == "-m" else Path(self.words[0]).stem

    @property
    def is_script_alone(self) -> bool:
        """True if the parser finds a script without a launcher, and nothing for the shell to do."""
        try:
            alone = self.launcher is None or not self.launcher.words
            return bool(self.words) and alone and not self._for_shell
        except InputError:
            return False

    @property
    def probable_imports(self) -> tuple[str, ...] | None:
        """What its ranks will probably import, beside torch; None if none will be forked."""
        try:
            return imported_frameworks(self.words, self.cwd) if not self.job_script else None
        except InputError:
            return None

    @property
    def read_launcher(self) -> Launcher | None:
        """The launcher that the parser finds in front of the script; None if it finds none."""
        try:
            return replace(self, observation=None, cwd=Path(self.typed_in or self.cwd)).launcher
        except InputError:
            return None


@dataclass(frozen=True)
class Start:
    """Start of the ranks of one configuration.

    Attributes:
        words: the command with every placeholder but those of a rank filled in.
        options: for the hook: `configuration` (every launch knob), `deepspeed` (laid over what the
            script passes; null takes a key away), `owned` (what its framework is told of batches),
            `activation_checkpointing` (set on the model), `micro_batch` (which an engine's batches
            must hold), `counts` (the first steps are counted), `quiet` (no checkpoint is written),
            `bare` (it is started as if without a launcher), `inspect` and `alter`, and `words` (of
            a rank below a whole command: as that types them, and as they are to be).
        env: what is added to the environment; `{rank}` and the like as in the words.
        secrets: values that words and env name as `{env:NAME}`; others are the environment's.
        steps: length of a training that the program takes by `--steps`; None if it does not.
        command: a line for the shell that starts every rank; "" if ranks are started from `words`.
    """

    words: tuple[str, ...]
    cwd: str
    options: Mapping[str, Any]
    config: Mapping[str, Any]
    env: Mapping[str, str]
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    steps: int | None = None
    command: str = ""

    def argv(
        self, rank: int, world: int, local_rank: int | None = None, node_rank: int = 0
    ) -> tuple[str, ...]:
        """Return the command of one rank of `world`; `local_rank` is its number on its node."""
        mine = _numbers(rank, world, local_rank, node_rank)
        return tuple(revealed(filled(word, mine), self.secrets) for word in self.words)

    def environment(
        self, rank: int, world: int, local_rank: int | None = None, node_rank: int = 0
    ) -> Mapping[str, str]:
        """Return the variables added to the environment of one rank."""
        mine = _numbers(rank, world, local_rank, node_rank)
        return {
            name: revealed(filled(value, mine), self.secrets) for name, value in self.env.items()
        }


def _numbers(rank: int, world: int, local_rank: int | None, node_rank: int) -> dict[str, str]:
    local = rank if local_rank is None else local_rank
    numbers = {"rank": rank, "local_rank": local, "node_rank": node_rank, "world_size": world}
    return {name: str(number) for name, number in numbers.items()}
