"""One printed page about a run, for the person who answers for a site's energy."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from html import escape

from tuner.display.html.pieces import template
from tuner.formatting import Units, duration, energy_text, percent
from tuner.results.parts import Point
from tuner.results.result import Result
from tuner.results.wall import WallCheck
from tuner.workload.probe import ProbeRecord

__all__ = ["summary_page"]

#: What each scope of a meter leaves out of the energy of a machine room.
_NOT_COUNTED = {
    "gpu": "processors and memory of the host, network, storage, power supplies and cooling",
    "module": "network, storage, power supplies and cooling, and what else is in the node",
    "node": "network, storage, power supplies and cooling, and GPUs unless the meter names them",
}
#: What stands for a host in probes that no host ran.
_NO_HOSTS = {"", "replay", "simulated"}


def summary_page(
    result: Result,
    records: Sequence[ProbeRecord],
    *,
    made_at: str,
    host: str,
    release: str,
    wall: WallCheck | None = None,
) -> str:
    """Return the page as HTML, which loads nothing and runs no script.

    Args:
        result: the answer.
        records: the probes it was computed from.
        made_at: time of the bundle, UTC, ISO 8601.
        host: machine that made the bundle.
        release: of joulefront.
        wall: comparison with a wall meter, if one was made.
    """
    advice = result.recommendation
    points = {"today": result.baseline, "recommended": result.recommended}
    parts = [
        _figures(result, points),
        _basis(result, records, wall),
        _search(result),
        _check(made_at),
    ]
    about = result.job.name if result.job else str(result.about.get("recorded", {}).get("table"))
    where = f" on {result.cluster.devices} x {result.cluster.device.name}" if result.cluster else ""
    return string.Template(template("summary.html")).substitute(
        title=escape(f"Energy of a training job: {result.name}"),
        subtitle=escape(f"{about}{where}, {result.steps:,} step{'s' * (result.steps != 1)}"),
        headline=escape(advice.headline if advice else "Nothing was measured."),
        body="\n".join(part for part in parts if part),
        footer=escape(f"Written by joulefront {release} on {host}, {made_at}."),
    )


def _figures(result: Result, points: Mapping[str, Point | None]) -> str:
    there = {name: point for name, point in points.items() if point is not None}
    if not there:
        return ""
    times = [point.time_to_solution_s for point in there.values()]
    units = Units.for_values([p.energy_to_solution_kJ for p in there.values()], times)
    rows = []
    for name, point in there.items():
        low, high = (units.energy_text(value) for value in point.energy_interval_kJ)
        cells = (
            units.energy_text(point.energy_to_solution_kJ),
            f"{low} to {high}",
            units.time_text(point.time_to_solution_s),
            f"{point.power_W:,.0f} W",
        )
        row = "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells)
        rows.append(f"<tr><td>{name}</td>{row}</tr>")
    kind = next(iter(there.values())).meter.mark or "metered"
    kind = kind if any(point.source == "measured" for point in there.values()) else "predicted"
    head = "".join(
        f'<th class="n">{text}</th>'
        for text in (f"energy ({kind})", "90 % interval", "time", "mean power")
    )
    table = f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"
    advice = result.recommendation
    limits = result.choice.sentence if advice is not None and advice.action == "train" else ""
    return f"<h2>Whole training</h2>\n{table}" + (f"<p>{escape(limits)}</p>" if limits else "")


def _kind(point: Point) -> str:
    """Return the word for a point's figures: metered, estimated or predicted."""
    return point.meter.label if point.source == "measured" else "predicted"


def _basis(result: Result, records: Sequence[ProbeRecord], wall: WallCheck | None) -> str:
    """Return on what the figures rest: meter, scope, windows, verification, calibration."""
    terms: dict[str, str] = {}
    for meter in dict.fromkeys(point.meter for point in result.points):
        terms["meter"] = f"{meter.source} ({meter.label})"
        terms["energy covers"] = meter.host or f"scope {meter.scope}"
        terms["not counted"] = _NOT_COUNTED.get(meter.scope, "everything outside the scope")
    windows = sum(len(record.measurements) for record in records)
    hosts = sorted({record.host for record in records} - _NO_HOSTS)
    began = min((record.started_at for record in records if record.started_at), default="")
    terms["probes"] = f"{windows} windows in {len(records)} probe launches" + (
        f", from {began}" if began else ""
    )
    if hosts:
        terms["machines"] = ", ".join(hosts[:6]) + (" ..." if len(hosts) > 6 else "")
    if result.verification is not None:
        terms["verification"] = result.verification.sentence
        for attempt in result.verification.attempts:
            if attempt.survived:
                terms["fresh launches"] = attempt.sentence
    calibration = result.about.get("calibration")
    if isinstance(calibration, Mapping):
        checks = [name for name in ("overhead", "agreement") if name in calibration]
        said = [f"{name}: {calibration[name]}" for name in checks]
        terms["meter's check"] = "; ".join(said)
    if wall is not None:
        terms["at the wall"] = wall.sentence
    return f"<h2>On what this rests</h2>\n{_terms(terms)}"


def _search(result: Result) -> str:
    spent = result.spent
    kind = _kind(result.points[0]) if result.points else "nothing measured"
    cost = f"{energy_text(spent.energy_kJ)} ({kind}) and {duration(spent.time_s)}"
    terms = {"cost": cost}
    advice = result.recommendation
    if advice is not None and advice.action == "train" and spent.payback_share is not None:
        terms["repaid after"] = f"{percent(spent.payback_share)} of one training"
    terms["end"] = result.stopped
    return f"<h2>What the search cost</h2>\n{_terms(terms)}"


def _check(made_at: str) -> str:
    text = (
        "This page is one file of an evidence bundle, which also holds every measurement. "
        "<code>tuner open FILE</code> on any machine checks the bundle's checksums, computes the "
        "answer again from the measurements, and says whether it is the same. The checksums show "
        "that nothing was changed since the bundle was made; who made it shows only a signature."
    )
    return f"<h2>How to check it</h2>\n<p>{text}</p>"


def _terms(terms: Mapping[str, str]) -> str:
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in terms.items() if text
    )
    return f"<dl>{rows}</dl>"
