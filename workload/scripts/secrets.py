"""Secrets of a pasted command, which are kept by name.

The value of a variable in front of the command, and of an argument that looks like a secret, is
replaced by `{env:NAME}` before anything reads the command. Files and messages hold that; the values
stay in memory, and are filled in where a rank starts. Later they are read from the environment.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from tuner.search_spaces.errors import InputError
from tuner.workload.scripts.script_facts import ASSIGNMENT, TAKEN, names_taken

# srun is no Python program, so its options without a value are a table: those of
# src/common/slurm_opt.c in Slurm's source (August 2026) that srun takes, older ones, and those of
# the plugin pyxis.
#: Long options that take no word after them; any other takes one, unless it holds a `=`.
_ALONE = """
async bcast compress consolidate-segments contiguous debugger-test disable-status exact exclusive
external-launcher get-user-env help hold immediate interactive kill-on-bad-exit label multi-prog
nice no-allocate no-kill oom-kill-step overcommit overlap oversubscribe parsable preserve-env
propagate pty quiet quit-on-interrupt reboot resv-ports send-libs spread-job spread-segments
stepmgr test-only unbuffered usage use-min-nodes verbose version wait-for-children whole x11
container-entrypoint container-mount-home container-readonly container-remap-root container-writable
no-container-entrypoint no-container-mount-home no-container-remap-root
"""
#: Letters of short options that take a value, and of those that have one in the same word if any.
_SHORT_WITH_VALUE, _SHORT_MAY = "AbBcCdDeFGiJLmMnNopPqrRStTUwWx", "IkK"
_LONG_OF = {"n": "ntasks", "N": "nodes", "D": "chdir", "c": "cpus-per-task", "m": "distribution"}
_PLACED = re.compile(r"\{(env:)?\w+(=[^{}]*)?\}")
_NUMBERED = r"(?:[-_]?(?:id|value|str|string|\d+))?"
#: Word at the end of the name of an option or variable that holds a secret.
SECRET_WORD = (
    r"(?:token|secret|(?:[A-Za-z]*pass(?:word|wd|phrase)|pass)|pwd|pw|credentials?|jwt|signature"
    r"|(?<![A-Za-z])auth|authorization|(?:api|access|private)[-_]?key|(?<=[-_])key)" + _NUMBERED
)
SECRET_NAME = re.compile(rf"(?i)(?:{SECRET_WORD}|key{_NUMBERED})$")
#: A name like that may also be a number of tokens, a special token, or a column of a table.
_NO_SECRET = re.compile(
    r"(?i).*=(true|false|none|\d{1,3}|<.*>|\s*)|.*(token|key)=[\d.,_e+]+"
    r"|(.*[-_.])?(eos|bos|pad|unk|sep|cls|mask|image|video|audio|special|stop)_?token=.*"
)
_COLUMN = re.compile(
    r"(?!.*(?i:api|access|private|secret|auth)[-_]?key=).*[kK][eE][yY]=([A-Z]{1,6}_)?[a-z_]+"
)
#: Forms of well-known tokens.
KNOWN_TOKEN = re.compile(
    r"hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-[\w-]{16,}|xox[abprs]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}"
)
#: Values that are secrets under any name: tokens, URLs with a password, headers.
SECRET_VALUE = re.compile(
    rf"{KNOWN_TOKEN.pattern}|://[^/\s:@]*:[^/\s@]+@|(?i:\b(?:bearer|basic)\s+\S{{8}})"
    r"|(?i:[?&][\w-]*(token|sig|signature|secret|password|key)=)|-----BEGIN[ A-Z]+-----"
)
_SWITCH = re.compile(r"(?i)true|false|\d{1,3}")
#: Variables whose values say how a job runs, and are kept.
_PUBLIC = re.compile(
    r"(NCCL|RCCL|GLOO|UCX|FI|OMP|GOMP|KMP|MKL|CUDA|CUDNN|CUBLAS|NVTE|NVIDIA|HIP|HSA|ROCR|XLA"
    r"|PYTORCH|TORCH|TORCHINDUCTOR|TORCHELASTIC|TRITON|DS|DEEPSPEED|ACCELERATE|FSDP"
    r"|PARALLELISM_CONFIG|PET|SLURM|MASTER)_\w+|(HF_HUB|HF_DATASETS|TRANSFORMERS)_OFFLINE"
    r"|TOKENIZERS_PARALLELISM|WANDB_MODE|PYTHONPATH|PYTHON(UNBUFFERED|FAULTHANDLER|HASHSEED)"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|PATH|NNODES|NODE_RANK|NPROC_PER_NODE|FORCE_TORCHRUN|OPTIM_TORCH"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|OPENBLAS_NUM_THREADS"
)


def is_public(name: str, value: str) -> bool:
    """Return True if a variable's value may be written down."""
    if SECRET_NAME.search(name) or SECRET_VALUE.search(value):
        return False
    return bool(_PUBLIC.fullmatch(name) or _SWITCH.fullmatch(value))


def _is_secret(name: str, value: str) -> bool:
    if SECRET_VALUE.search(value):
        return True
    text = f"{name}={value}"
    plain = _NO_SECRET.fullmatch(text) or _COLUMN.fullmatch(text)
    return bool(SECRET_NAME.search(name)) and not plain


def hidden(words: Sequence[str], public: Collection[str] = ()) -> tuple[list[str], dict[str, str]]:
    """Return a command without its secrets, and these by the names of their variables."""
    made, values = list(words), dict[str, str]()

    def variable(text: str) -> str:
        name, equals, value = text.partition("=")
        kept = not value or name in public or is_public(name, value) or _PLACED.search(value)
        return text if kept or not equals else f"{name}={_taken(name, value, values)}"

    front = dict(_assignments(words))
    for at, of_srun in front.items():
        option = "--export=" if of_srun and words[at].startswith("--export=") else ""
        items = words[at].removeprefix(option).split(",") if of_srun else [words[at]]
        made[at] = option + ",".join(map(variable, items))
    option = ""
    for at, word in enumerate(words):
        if at in front:
            continue
        name, equals, value = word.partition("=")
        if not equals or re.search(r"[\s/:]", name):
            name, value = option, word
        option = word if word.startswith("-") and not equals else ""
        if not option and not _PLACED.search(word) and _is_secret(name, value):
            taken = _taken(f"ARG_{_variable(name) or 'SECRET'}", value, values)
            made[at] = taken if value == word else f"{name}={taken}"
    return made, values


def _taken(name: str, value: str, values: dict[str, str]) -> str:
    free, number = name, 2
    while values.get(free, value) != value:
        free, number = f"{name}_{number}", number + 1
    values[free] = value
    return f"{{env:{free}}}"


def _variable(option: str) -> str:
    return re.sub(r"\W+", "_", option.strip("-")).strip("_").upper()


def _assignments(words: Sequence[str]) -> Iterator[tuple[int, bool]]:
    at = 0
    while at < len(words):
        if Path(words[at]).name == "env":
            at += 1
        while at < len(words) and ASSIGNMENT.fullmatch(words[at]):
            yield at, False
            at += 1
        if not is_srun(words[at:]):
            return
        length = options_of_srun(words[at:])[1]
        for place in range(at + 1, at + length):
            if words[place].startswith("--export=") or words[place - 1] == "--export":
                yield place, True
        at += length


def is_srun(words: Sequence[str]) -> bool:
    """Return True if a command begins with srun."""
    return "srun" in (Path(word).name for word in words[:1])


def options_of_srun(words: Sequence[str]) -> tuple[dict[str, str], int]:
    """Return srun's options, and the place of the command; InputError if a value is missing."""
    options: dict[str, str] = {}
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word = words[at]
        at += 1
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and name not in _ALONE.split():
                value, at = _value(words, at, word)
            options["ntasks-per-node" if name == "tasks-per-node" else name] = value
            continue
        letters = word[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in _SHORT_WITH_VALUE:
                value, letters = letters, ""
                if not value:
                    value, at = _value(words, at, f"-{letter}")
                options[_LONG_OF.get(letter, letter)] = value
            elif letter in _SHORT_MAY:
                letters = ""
    return options, at


def _value(words: Sequence[str], at: int, option: str) -> tuple[str, int]:
    if at >= len(words):
        raise InputError(f"srun's option {option} must be followed by a value")
    return words[at], at + 1


def require(names: Sequence[str], values: Mapping[str, str]) -> None:
    """Raise InputError if a variable has no value, neither given nor in the environment."""
    missing = [name for name in names if name not in values and name not in os.environ]
    if missing:
        shown = " ".join(f"{name}=..." for name in missing)
        raise InputError(
            f"the study keeps no values of {', '.join(missing)}, which its command needs; set "
            f"them in front of tuner: {shown} tuner ..."
        )


def revealed(text: str, values: Mapping[str, str]) -> str:
    """Return a text with its variables' values; InputError if one has none."""
    require(names_taken([text]), values)
    return TAKEN.sub(lambda found: values.get(found[1]) or os.environ[found[1]], text)


def shell_words(words: Sequence[str]) -> str:
    """Return a command for the shell, with variables in place of secrets."""
    return " ".join(map(_quoted, words))


def shell_line(line: str) -> str:
    """Return a line for the shell, with variables in place of secrets."""
    return TAKEN.sub(r"${\1}", line)


def _quoted(word: str) -> str:
    parts = TAKEN.split(word)  # text, name, text, ...
    if len(parts) == 1:
        return shlex.quote(word)
    return "".join(
        f'"${{{part}}}"' if at % 2 else shlex.quote(part) if part else ""
        for at, part in enumerate(parts)
    )
