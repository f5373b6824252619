"""Rewrite .ci/requirements.txt: the pins of constraints.txt, each with the sha256 of its files.

usage: make hashes

The files of a release are those that pip finds as it is set up here, in the index and in local
folders (`find-links`): the source archive, and wheels of every platform for CPython 3.11, which CI
runs. The index gives the hashes; only local files are read, and nothing is downloaded. Of a release
that a local folder has (a CPU build of torch, say) only the local files are listed: pip prefers
files whose hash the index gives, and would otherwise take the build with CUDA, whose further
packages are not pinned.
"""

import hashlib
import re
import sys
from pathlib import Path

# pip prints no list of a release's files; its own finder, of the pip in this virtual environment,
# reads the same index, settings and certificates as `pip install`.
from pip._internal.commands import create_command
from pip._internal.index.collector import parse_links
from pip._internal.models.link import Link
from pip._vendor.packaging.utils import (
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from pip._vendor.packaging.version import Version

ROOT = Path(__file__).parents[1]
WRITTEN = ROOT / ".ci" / "requirements.txt"
HEADER = "# Written by `make hashes` from constraints.txt: the files that CI may install.\n"


def version_of(link: Link) -> Version | None:
    """Return the public version of a file that CPython 3.11 can use, or None for any other file."""
    name = link.filename
    try:
        if not name.endswith(".whl"):
            return Version(parse_sdist_filename(name)[1].public)
        _, version, _, tags = parse_wheel_filename(name)
    except ValueError:
        return None
    fits = any(t.interpreter in ("py3", "py311", "cp311") or t.abi == "abi3" for t in tags)
    return Version(version.public) if fits else None


def sha256_of(link: Link) -> str:
    """Return the hash that the index gives, or compute that of a local file.

    Raises:
        SystemExit: the index gives none.
    """
    if link.hash_name == "sha256" and link.hash:
        return link.hash
    if not link.is_file:
        sys.exit(f"the index gives no sha256 of {link.filename}")
    return hashlib.sha256(Path(link.file_path).read_bytes()).hexdigest()


def main() -> None:
    command = create_command("install")
    with command.main_context():
        options, _ = command.parse_args([])
        finder = command._build_package_finder(options, command.get_default_session(options))
        collector = finder._link_collector
        pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text().split()]
        text = HEADER
        for name, version in pins:
            pages = [
                collector.fetch_response(Link(f"{url.rstrip('/')}/{canonicalize_name(name)}/"))
                for url in finder.index_urls
            ]
            links = [link for page in pages if page for link in parse_links(page)]
            for folder in map(Path, finder.find_links):
                links += [Link(path.resolve().as_uri()) for path in folder.iterdir()]
            files = [
                link
                for link in links
                if canonicalize_name(re.split(r"-\d", link.filename)[0]) == canonicalize_name(name)
                and version_of(link) == Version(version)
            ]
            local = [link for link in files if link.is_file and link.hash is None]
            found = {sha256_of(link) for link in local or files}
            if not found:
                sys.exit(f"no file of {name}=={version} is found")
            lines = [f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in sorted(found))]
            text += " \\\n    ".join(lines) + "\n"
    WRITTEN.write_text(text)


if __name__ == "__main__":
    main()
