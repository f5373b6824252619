"""Configuration of a model from its hub, by huggingface_hub's own call: config.json and no code."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from tuner.search_spaces.errors import InputError

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
