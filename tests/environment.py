"""The environment of the tests: stated here, whatever a shell, an editor or CI has set.

A variable that is neither stated nor kept is removed, so that none of them changes an outcome: of
Python (PYTHONUNBUFFERED hid a fault for months), of torch and BLAS, of a terminal, of a cluster's
scheduler. Kept is where pip finds packages and how this machine's network is reached, for the tests
that install. `conftest.py` states it before anything else is imported.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

#: Where Linux distributions have their programs.
SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: One thread: those of small matrix products only wait for each other beside the tests' own
#: processes, and the tests of the search take five times as long with two.
STATED = {
    "LANG": "C.UTF-8",
    "TERM": "xterm",
    "TZ": "UTC",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",  # no test asks a hub but its own
}
#: The network and its certificates, packages, temporary files, and what the tests themselves read.
KEPT = (
    *("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO"),
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONSTRAINT"),
    *("PIP_CERT", "PIP_CLIENT_CERT", "PIP_TRUSTED_HOST", "PIP_PROXY", "PIP_KEYRING_PROVIDER"),
    *("PIP_TIMEOUT", "PIP_DEFAULT_TIMEOUT", "PIP_RETRIES", "PIP_CACHE_DIR", "PIP_CONFIG_FILE"),
    *("TMPDIR", "JOULEFRONT_TRACES"),
)
#: The kernels of OpenBLAS that `make other-cpu` asks for.
KERNEL = "JOULEFRONT_TEST_KERNEL"
#: Seconds after which a compilation of one of DeepSpeed's operators has ended, or was killed.
LONGEST_BUILD_S = 600.0
#: Addresses of this machine, which no proxy reaches.
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def stated(inherited: Mapping[str, str], home: Path, programs: Path) -> dict[str, str]:
    """Return the variables of the tests.

    Args:
        inherited: the variables with which pytest was started.
        home: the tests' own.
        programs: a folder with the programs that this machine has at unusual places.
    """
    found = {name: value for name, value in inherited.items() if name in KEPT}
    found |= {name: value for name, value in inherited.items() if name.startswith("PYTEST_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), SYSTEM, str(programs)])
    found |= {**STATED, "PATH": path, "HOME": str(home)}
    own = Path(inherited.get("HOME") or os.devnull)
    # What the home says of packages, and what was downloaded.
    settings = [own / ".config" / "pip" / "pip.conf", own / ".pip" / "pip.conf"]
    for name, places in (
        ("PIP_CONFIG_FILE", [path for path in settings if path.is_file()]),
        ("PIP_CACHE_DIR", [cache_of(inherited) / "pip"]),
        ("PYENV_ROOT", [Path(inherited.get("PYENV_ROOT") or own / ".pyenv")]),
    ):
        if name not in found and places and places[0].exists():
            found[name] = str(places[0])
    unproxied = [inherited.get("no_proxy") or inherited.get("NO_PROXY"), *LOOPBACK]
    if any(name.lower().endswith("_proxy") for name in found):
        found["no_proxy"] = found["NO_PROXY"] = ",".join(filter(None, unproxied))
    if kernel := inherited.get(KERNEL):
        found["OPENBLAS_CORETYPE"] = kernel
    libraries = inherited.get("LD_LIBRARY_PATH")
    if libraries and not _starts(found):  # a Python of a cluster's module
        found["LD_LIBRARY_PATH"] = libraries
    return found


def cache_of(inherited: Mapping[str, str]) -> Path:
    """Return the folder of the user's caches."""
    return Path(inherited.get("XDG_CACHE_HOME") or Path(inherited.get("HOME") or "/") / ".cache")


def remove_old_locks(cache: Path) -> None:
    """Remove the locks of compilations that were killed: torch waits for them without an end."""
    for lock in cache.glob("torch_extensions/*/*/lock"):
        with contextlib.suppress(OSError):
            if time.time() - lock.stat().st_mtime > LONGEST_BUILD_S:
                lock.unlink()


def _starts(variables: Mapping[str, str]) -> bool:
    done = subprocess.run([sys.executable, "-c", ""], env=variables, capture_output=True)
    return done.returncode == 0


def begin(programs: Iterable[str]) -> Path | None:
    """State the environment of this process; return the home for `end`, None if it is another's.

    The workers of pytest-xdist are started by a process whose environment is stated.

    Args:
        programs: that tests look for, and which may be at unusual places.
    """
    # readline, which pytest imports, sets them behind os.environ, and children would have them.
    for name in ("LINES", "COLUMNS"):
        os.environ.pop(name, None)
        os.unsetenv(name)
    if "PYTEST_XDIST_WORKER" in os.environ:
        return None
    inherited = dict(os.environ)
    top = Path(tempfile.mkdtemp(prefix="joulefront-tests-"))
    home, elsewhere = top / "home", top / "programs"
    home.mkdir()
    elsewhere.mkdir()
    for name in programs:
        if not shutil.which(name, path=SYSTEM) and (found := shutil.which(name)):
            (elsewhere / name).symlink_to(found)
    # What was compiled is not compiled again.
    cache = cache_of(inherited) / "joulefront-tests"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError:
        cache = home / ".cache"
    else:
        (home / ".cache").symlink_to(cache)
        remove_old_locks(cache)
    variables = stated(inherited, home, elsewhere)
    os.environ.clear()
    os.environ.update(variables)
    os.umask(0o022)
    return top


def end(top: Path | None) -> None:
    """Remove the home of the tests."""
    if top is not None:
        shutil.rmtree(top, ignore_errors=True)
