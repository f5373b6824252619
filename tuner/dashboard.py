"""The study in optuna-dashboard, with our own figures beside its own.

The dashboard has no hypervolume curve, no intervals and no front under constraints, so `publish`
saves ours as study graphs under fixed ids (saving again overwrites) and the choice as the study's
note. Every save is split into attributes of about 2 kB that a journal keeps for ever, so figures
are published every few probes and at the end, not at every one. `serve` listens on loopback unless
told otherwise, because the dashboard asks nobody who they are.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_spaces.errors import InputError, InvalidValue
from tuner.result import Result
from tuner.wording import comparison, is_estimated, knobs, label, payback, prediction, units_of

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage

__all__ = ["GRAPH_IDS", "application", "note", "publish", "serve"]

#: The study graphs that `publish` writes; each id overwrites what stood under it.
GRAPH_IDS = ("joulefront-front", "joulefront-hypervolume")


def _dashboard() -> Any:
    try:
        import optuna_dashboard
    except ImportError as error:
        raise InputError(
            "optuna-dashboard is not installed; install it with pip install 'joulefront[dashboard]'"
        ) from error
    return optuna_dashboard


def _open(storage: BaseStorage | str | Path) -> BaseStorage:
    """A storage by itself, by URL ("sqlite:///PATH", "postgresql://...") or by a journal's path."""
    from optuna.storages import BaseStorage

    if isinstance(storage, BaseStorage):
        return storage
    from tuner.study import open_storage

    text = str(storage)
    if "://" in text:
        return open_storage(text, Path())
    if not Path(text).is_file():
        raise InputError(f"there is no study at {text!r}; give a journal file or a storage URL")
    return open_storage(None, Path(text))


def _artifact_store(artifacts: Path | str | None) -> Any:
    if artifacts is None:
        return None
    from optuna.artifacts import FileSystemArtifactStore

    folder = Path(artifacts)
    if not folder.is_dir():
        raise InputError(f"there is no folder of artifacts at {str(folder)!r}")
    return FileSystemArtifactStore(folder)


def application(storage: BaseStorage | str | Path, *, artifacts: Path | str | None = None) -> Any:
    """The dashboard as a WSGI application, to be mounted in any server.

    Raises:
        InputError: optuna-dashboard is not installed, or the storage does not answer.
    """
    dashboard = _dashboard()
    return dashboard.wsgi(_open(storage), artifact_store=_artifact_store(artifacts))


def serve(
    storage: BaseStorage | str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    artifacts: Path | str | None = None,
) -> None:
    """Serve the dashboard of every study in `storage` at http://host:port/ until interrupted.

    Args:
        storage: an Optuna storage, its URL, or the path of a journal file.
        host: the address to listen on. Anything but loopback shows the study to whoever reaches
            this machine, and lets them change it.
        port: 1 to 65535.
        artifacts: the folder of the study's artifacts, where it has one.

    Raises:
        InputError: optuna-dashboard is not installed, the storage does not answer, or the port is
            taken.
    """
    if not 0 < port < 65536:
        raise InvalidValue("port", port, "1 to 65535")
    dashboard = _dashboard()
    opened, store = _open(storage), _artifact_store(artifacts)
    try:
        dashboard.run_server(opened, host=host, port=port, artifact_store=store)
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def publish(study: Study, result: Result) -> None:
    """Save our figures and the choice where the dashboard shows them.

    Overwrites what an earlier call wrote. Does not raise where a figure has nothing to draw.

    Raises:
        InputError: optuna-dashboard is not installed.
    """
    from tuner.plots import front_figure, hypervolume_figure

    dashboard = _dashboard()
    titles = ("Front of energy against time", "Front against probing energy")
    drawn = (front_figure(result), hypervolume_figure(result))
    for name, title, figure in zip(GRAPH_IDS, titles, drawn, strict=True):
        if figure is not None:
            figure.update_layout(title={"text": title, "font": {"size": 15}}, margin={"t": 90})
            dashboard.save_plotly_graph_object(study, figure, graph_object_id=name)
    dashboard.save_note(study, note(result))


def note(result: Result) -> str:
    """The choice as Markdown, for the study's page. Users' words are escaped, as the page may read
    tags in them."""
    units = units_of(result)
    lines = [f"**{html.escape(result.choice.sentence)}**", ""]
    if said := prediction(result):
        lines += [html.escape(said), ""]
    if result.best is not None:
        best = result.best
        estimated = label(best.meter.estimated)
        configuration = html.escape(" ".join(knobs(best.configuration))).replace("`", "'")
        lines += [
            html.escape(comparison(result, units)),
            "",
            f"- configuration: `{configuration or 'default'}`",
            f"- energy to solution: {units.energy_text(best.energy_to_solution_kJ)}{estimated}",
            f"- time to solution: {units.time_text(best.time_to_solution_s)}",
            f"- search: {result.spent.probes} probes, {result.spent.failed} failed, "
            f"{result.spent.energy_kJ:,.3g} kJ{label(is_estimated(result))}",
            f"- {html.escape(payback(result))}",
        ]
    return "\n".join(lines)
