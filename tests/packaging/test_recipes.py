"""Recipes, cluster files and files for contributors: what they name exists, and they parse."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tuner.cli.main import command_parser
from tuner.problem.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
CONTRIB = ROOT / "contrib"


def is_a_command(words: list[str]) -> bool:
    try:
        command_parser().parse_args(words)
    except SystemExit:
        return False
    return True


def documents(path: Path) -> list[Any]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def containers(value: Any) -> list[dict[str, Any]]:
    """Return the containers of a Kubernetes object, at any depth."""
    if isinstance(value, list):
        return [found for part in value for found in containers(part)]
    if not isinstance(value, dict):
        return []
    own = value.get("containers", [])
    return own + [found for part in value.values() for found in containers(part)]


def test_the_job_starts_a_command_and_mounts_what_it_declares() -> None:
    (job,) = documents(CONTRIB / "kubernetes" / "tune-job.yaml")
    pod = job["spec"]["template"]["spec"]
    (container,) = containers(job)
    assert is_a_command(container["args"])
    name = container["args"][container["args"].index("--name") + 1]
    assert RunFolder.named("runs", name)
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}
    (shm,) = (each for each in pod["volumes"] if each["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"


def test_the_ray_job_runs_a_command_and_sends_no_usage_statistics() -> None:
    (job,) = documents(CONTRIB / "kubernetes" / "tune-rayjob.yaml")
    assert is_a_command(shlex.split(job["spec"]["entrypoint"])[1:])
    found = containers(job)
    assert len(found) == 2
    for container in found:
        environment = {each["name"]: each for each in container["env"]}
        assert environment["RAY_USAGE_STATS_ENABLED"]["value"] == "0"


def test_the_container_recipes_install_the_wheel_where_it_is_copied() -> None:
    text = (CONTRIB / "containers" / "Containerfile").read_text()
    steps = re.sub(r"\\\n", " ", text)
    copied = re.search(r"^COPY \S+ (\S+)$", steps, re.M)
    (run,) = [line for line in steps.splitlines() if "pip install" in line and "RUN" in line]
    assert f'wheel="$(ls {copied[1]}joulefront-*.whl)"' in run
    assert re.search(r'^ENTRYPOINT \["tuner"\]$', text, re.M)
    for script in re.findall(r"^RUN (.*)$", steps, re.M):
        subprocess.run(["bash", "-n", "-c", script], check=True)

    definition = (CONTRIB / "containers" / "joulefront.def").read_text()
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", definition, re.M | re.S))
    folder = sections["files"].split()[1]
    assert f"{folder}/joulefront-*.whl" in sections["post"]
    for name in ("post", "runscript", "test", "environment"):
        subprocess.run(["bash", "-n", "-c", sections[name]], check=True)


def test_the_module_file_finds_the_commands() -> None:
    text = (CONTRIB / "modules" / "joulefront.lua").read_text()
    assert 'prepend_path("PATH", pathJoin(folder, "bin"))' in text
    assert text.count("(") == text.count(")")


def test_the_skill_names_commands_and_fields_that_exist() -> None:
    path = CONTRIB / "skill" / "joulefront" / "SKILL.md"
    _, header, text = path.read_text().split("---\n", 2)
    fields = yaml.safe_load(header)
    assert fields["name"] == path.parent.name
    assert 50 < len(fields["description"]) < 1024
    commands = re.findall(r"`tuner ([^`]+)`", text) + re.findall(r"^tuner (.*)$", text, re.M)
    assert len(commands) > 5
    for command in commands:
        words = shlex.split(command.replace("`", ""))
        assert is_a_command(words), command
    named = set(re.findall(r"`(--[\w-]+)`", text))
    known = {
        flag for each in _commands() for action in each._actions for flag in action.option_strings
    }
    assert named <= known


def _commands() -> list[Any]:
    from benchmarks.reference import commands_of

    return list(commands_of(command_parser()))


@pytest.mark.parametrize("name", ["bug", "framework", "figure"])
def test_an_issue_form_asks_for_what_it_needs(name: str) -> None:
    (form,) = documents(ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert {"name", "description", "body"} <= set(form)
    assert any(part.get("validations", {}).get("required") for part in form["body"])


def test_the_citation_is_of_this_release() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (citation,) = documents(ROOT / "CITATION.cff")
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md"])
def test_links_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert not [link for link in links if not (ROOT / link).exists()]
    for path in re.findall(r"`((?:tests|workload|search_spaces|models|docs)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
