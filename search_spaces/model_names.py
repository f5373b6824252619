"""Jobs of models that are named without a job file: a config.json, a folder of one, a hub's name.

What such a name does not give is assumed, and every assumption is a sentence. A name is looked up
in the cache that transformers fills, and then on its hub, of which the configuration alone is read.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tuner.search_spaces.data_files import read_json_object
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import shortened
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.library_count import parameters_in_diffusers
from tuner.search_spaces.model_facts import ModelFacts

#: Patience with a hub that does not answer, s.
_LIMIT_S = 5.0
_PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def fetched_config(name: str, file: str) -> tuple[Path | None, str]:
    """Fetch the configuration of a model to transformers' cache; None and why if it cannot be.

    InputError if the hub has no such model, or gives it to no one without leave.
    """
    for variable in _OFFLINE:
        if os.environ.get(variable, "").lower() in ("1", "true", "yes", "on"):
            return None, f"{variable} is set"
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if not _responds(endpoint):
        return None, f"{endpoint} does not answer"
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # it is read when it is imported
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
        from huggingface_hub.utils import disable_progress_bars, logging
    except ImportError:
        return None, "huggingface_hub is not installed"
    logging.set_verbosity_error()
    disable_progress_bars()
    try:
        return Path(hf_hub_download(name, file, etag_timeout=_LIMIT_S)), ""
    except GatedRepoError as error:
        raise InputError(
            f"the model {name} is gated: accept its terms at {endpoint}/{name} and `hf auth login`,"
            f" or name the folder that has its {file}"
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"{endpoint} has no model {name}, or a private one; correct the name or `hf auth login`"
        ) from error
    except Exception as error:  # of whichever client it uses; the cause is said
        cause = next(iter(str(error).splitlines()), "") or type(error).__name__
        return None, cause[:120].rstrip(".")


def _responds(endpoint: str) -> bool:
    """Return True if a hub can be reached, or is beyond a proxy; its client tries for long."""
    if any(os.environ.get(name) for name in _PROXIES):
        return True
    parts = urlsplit(endpoint)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=_LIMIT_S).close()
    except OSError:
        return False
    return True


#: Sequences of an optimizer step, and the longest sequence in tokens, where nothing says them.
BATCH, TOKENS = 256, 4096
_CONFIG = "config.json"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_model(text: str) -> bool:
    """Return True if a word names a model and no job file or shipped job."""
    path = Path(text)
    if path.suffix == ".json" or (path / _CONFIG).is_file():
        return True
    return bool(_NAME.fullmatch(text)) and path.suffix != ".toml" and not path.exists()


def job_of_model(
    text: str, *, sequence_length: int | None = None, global_batch: int | None = None
) -> tuple[TrainingJob, tuple[str, ...]]:
    """Return the job of a named model, and the assumptions about it.

    Raises:
        InputError: the model is not on this machine, or its configuration cannot be read.
    """
    file = _config_file(text)
    config = _read(file)
    positions = ModelFacts.from_config(config).positions
    length = sequence_length or min(positions or TOKENS, TOKENS)
    given = {"--sequence-length": sequence_length, "--global-batch": global_batch}
    chosen = {
        "--sequence-length": f"{length:,} tokens a sequence",
        "--global-batch": f"{global_batch or BATCH:,} sequences a step",
    }
    unsaid = [option for option, value in given.items() if value is None]
    words = [f"{chosen[option]} ({option})" for option in unsaid] + ["AdamW in bf16"]
    name = text.strip("/").rpartition("/")[2] if file.name == _CONFIG else file.stem
    if name == _CONFIG:
        name = file.resolve().parent.name
    job = TrainingJob(
        name=name or "model",
        model=config,
        sequence_length=length,
        global_batch=global_batch or BATCH,
    )
    return job, (f"assumed: {', '.join(words)}, all parameters trained",)


def config_of_model(text: str) -> Mapping[str, Any]:
    """Return the configuration of a model that is named as in `job_of_model`."""
    return _read(_config_file(text))


def _config_file(text: str) -> Path:
    path = Path(text)
    if path.is_file():
        return path
    if (path / _CONFIG).is_file():
        return path / _CONFIG
    if path.suffix == ".json" or not _NAME.fullmatch(text):
        raise InputError(f"there is no model config {text}; name a config.json or its folder")
    found, why = _cached(text), ""
    if found is None:
        found, why = fetched_config(text, _CONFIG)
    if found is None:
        raise InputError(
            f"the model {text} is not in transformers' cache {_cache()}, and was not fetched "
            f"({why}); where there is a network, `hf download {text} {_CONFIG}`, or name the "
            "folder that has it"
        )
    return found


def _cache() -> Path:
    """Return the folder of transformers' downloads."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    return Path(cache).expanduser()


def _cached(name: str) -> Path | None:
    """Return a model's configuration in the cache, of the main revision or else of the newest."""
    folder = _cache() / f"models--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    if main.is_file():
        file = folder / "snapshots" / main.read_text(encoding="utf-8").strip() / _CONFIG
        if file.is_file():
            return file
    found = [file for file in folder.glob(f"snapshots/*/{_CONFIG}") if file.is_file()]
    return max(found, key=lambda file: file.stat().st_mtime, default=None)


def _read(file: Path) -> Mapping[str, Any]:
    data = read_json_object(file, f"model config {file}")
    if "model_type" not in data and isinstance(data.get("_class_name"), str):
        raise InputError(_of_diffusers(file, data))
    if "model_type" not in data:
        raise InputError(
            f"{file} names no model_type, so it is not the config.json of a Hugging Face model"
        )
    return data


def _of_diffusers(file: Path, config: Mapping[str, Any]) -> str:
    """Return the sentence on a model of diffusers: its size, and what can be done."""
    parameters, why = parameters_in_diffusers(config)
    size = f"it was not counted: {why}"
    if parameters is not None:
        states = 16 * parameters / 1e9
        size = (
            f"it has {parameters / 1e9:.3g} billion parameters, {2 * parameters / 1e9:.3g} GB in "
            f"16 bits and {states:.3g} GB with all states of AdamW in mixed precision"
        )
    return (
        f"{file} is of {shortened(config['_class_name'])}, a model of diffusers; {size}; what its "
        "layers keep is known only from a start, so measure its command: tuner optimize -- COMMAND"
    )
