"""Rights of training, of its ranks and of other users."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tuner.search_spaces.errors import InputError

#: Environment variable that holds what `tuner --storage` takes.
STORAGE = "JOULEFRONT_STORAGE"
#: Variables that open doors to more than training needs.
_SECRETS = (STORAGE, "RAY_AUTH_TOKEN")


def refuse_sudo(environ: Mapping[str, str] = os.environ) -> None:
    """Raise InputError as root for another user, whose files and code root would start."""
    if os.geteuid() == 0 and environ.get("SUDO_UID", "0") != "0":
        raise InputError(
            "tuner runs as the user, not by sudo: start it again without sudo, and let zeusd or "
            "joulefront's guard set the clocks (tuner doctor prints the lines for an "
            "administrator); where everything shall run as root: env -u SUDO_UID tuner ..."
        )


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that ranks and their commands get."""
    return {name: value for name, value in environ.items() if name not in _SECRETS}


def private_folder(path: Path) -> None:
    """Make a folder that other users cannot enter, whatever the umask; leave one that exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    path.chmod(0o700)
