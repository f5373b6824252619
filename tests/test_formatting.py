"""Figures, units and settings as texts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.results import ESTIMATED, NVML, TWIN, point
from tuner.formatting import (
    Units,
    after_comma,
    change,
    common_mark,
    counted,
    differing_knobs,
    duration,
    energy_text,
    knob_text,
    label,
    long_text,
    number,
    percent,
    probability,
    right_aligned,
    settings_legend,
    settings_text,
    signed_percent,
    varying_knobs,
)
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.fields import parse_quantity

TODAY = Configuration.of(micro_batch=4, zero_stage=0)
CHOICE = Configuration.of(micro_batch=16, zero_stage=0, clock_MHz=1050)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (1.0, "1.00"),
        (12.345, "12.3"),
        (123.4, "123"),
        (12345.6, "12,346"),
        (-2.5, "-2.50"),
        (math.nan, "unknown"),
        (math.inf, "unknown"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("kJ", "s", "energy", "time"),
    [
        (25.0, 599.0, "25.0 kJ", "599 s"),
        (25.0, 600.0, "25.0 kJ", "10.0 min"),
        (25.0, 3600.0, "25.0 kJ", "1.00 h"),
        (0.05, 5.0, "50.0 J", "5.00 s"),
        (3599.0, 5.0, "3,599 kJ", "5.00 s"),
        (3600.0, 5.0, "1.00 kWh", "5.00 s"),
        (3e6, 36000.0, "833 kWh", "10.0 h"),
        (5e9, 9e6, "1,389 MWh", "104 days"),
        (5e12, 9e6, "1,389 GWh", "104 days"),
    ],
)
def test_units_follow_the_size(kJ: float, s: float, energy: str, time: str) -> None:
    units = Units.for_values([kJ, kJ / 7, math.nan], [s])
    assert units.energy_text(kJ) == energy
    assert units.time_text(s) == time


@settings(derandomize=True, deadline=None)
@given(st.floats(1e-6, 1e15))
def test_an_energy_reads_back_as_itself_and_has_one_to_four_figures(kJ: float) -> None:
    """Joules in, joules out."""
    text = energy_text(kJ)
    assert parse_quantity(text.replace(",", ""), "kJ") == pytest.approx(kJ, rel=0.0051)
    assert kJ >= 3.6e12 or len(text.split()[0].replace(",", "").partition(".")[0]) <= 4


@pytest.mark.parametrize(
    ("share", "text", "signed"),
    [
        (0.0, "0 %", "0 %"),
        (0.0001, "under 0.1 %", "0 %"),
        (0.0345, "3.5 %", "+3 %"),
        (0.123, "12 %", "+12 %"),
        (-0.123, "-12 %", "-12 %"),
        (12.34, "1,234 %", "+1,234 %"),
    ],
)
def test_percent(share: float, text: str, signed: str) -> None:
    assert percent(share) == text
    assert signed_percent(share) == signed


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (0.99999, "more than 99.9 %"),
        (0.999, "99.9 %"),
        (0.9, "90 %"),
        (0.948, "94 %"),
        (0.001, "less than 1 %"),
    ],
)
def test_no_probability_is_rounded_to_certainty(p: float, text: str) -> None:
    assert probability(p) == text


@pytest.mark.parametrize(
    ("now", "less", "text"),
    [
        (90, "less energy", "10 % less energy"),
        (103, "less energy", "3 % more energy"),
        (100.01, "less energy", "the same energy"),
        (100.01, "faster", "no difference"),
        (math.nan, "less energy", "an unknown change: less energy"),
    ],
)
def test_change(now: float, less: str, text: str) -> None:
    assert change(now, 100, less, "more energy") == text


def test_a_change_that_rounds_to_nothing_is_none() -> None:
    assert change(100.4, 100, "less time", "more time") == "the same time"
    assert change(99.4, 100, "less time", "more time") == "1 % less time"
    assert change(2000, 100, "less", "more") == "1,900 % more"


@pytest.mark.parametrize(
    ("before", "now", "digits"),
    [
        ((10.0, 100.0), (8.5, 100.0), 3),
        ((10.0, 3.384), (8.5, 3.838), 4),  # 3.38 h to 3.84 h reads as 14 %, not 13
        ((10.0, 1.0), (10.0, 1.0), 3),
        ((10.0, 1.0), (1e9, 1e9), 3),
        ((10.0, 1.21), (10.0, 5.668), 3),  # 368 %, where 5.67 over 1.21 is 369
        ((1.0, 1.0), (1e-14, 1e-14), 3),  # written as 0
        ((1.0, 1.0), (math.nan, math.inf), 3),
        ((1.0, 1.0), (0.994999999, 1.0), 3),  # 0.995 is 0 % less, as is the truth
        ((1.05117, 1.0), (1.08774, 1.0), 5),  # 1.05 to 1.09 and 1.051 to 1.088 read as 4 %
    ],
)
def test_figures_have_the_digits_that_tell_their_ratio(
    before: tuple[float, float], now: tuple[float, float], digits: int
) -> None:
    was, then = (
        point(CHOICE, time_s, 1000 * energy_kJ / time_s, NVML)
        for energy_kJ, time_s in (before, now)
    )
    assert Units().telling([(was, then)]).digits == digits
    assert Units().telling([]).digits == 3


def test_units_of_points_place_them_and_their_intervals() -> None:
    far = point(CHOICE, 7200.0, 1000.0, NVML)
    units = Units.of([far])
    assert units.place(far) == (pytest.approx(2.0), pytest.approx(2.0))
    assert units.interval_text((3600.0, 7200.0), units.s) == "1.00 to 2.00"
    assert units.interval_text((3600.0, math.inf), units.s) == ""
    step = Units.of([point(CHOICE, 2.0, 1000.0, NVML, of_step=True)])
    assert (step.energy, step.time) == ("kJ/step", "s/step")
    assert energy_text(7200.0) == "2.00 kWh"
    assert [duration(time_s) for time_s in (45, 1860, 12240)] == ["45 s", "31 min", "3.4 h"]


def test_settings_are_named_by_what_differs() -> None:
    assert settings_text(CHOICE, TODAY) == "mb16 1050MHz"
    assert settings_text(TODAY, CHOICE) == "mb4 clock-auto"
    assert settings_text(CHOICE, CHOICE) == settings_text(CHOICE) == "mb16 zero0 1050MHz"
    stated, left = Configuration.of(micro_batch=4, zero_stage=0), Configuration.of(micro_batch=4)
    assert stated != left  # and trains the same: something is named all the same
    assert settings_text(stated, left) == settings_text(stated) == "mb4 zero0"
    assert differing_knobs(CHOICE, TODAY) == ("micro_batch", "clock_MHz")
    assert varying_knobs([CHOICE, TODAY]) == ("micro_batch", "clock_MHz")
    assert long_text(CHOICE) == "micro_batch=16 zero_stage=0 clock_MHz=1050"
    assert knob_text("clock_MHz", None) == "clock_MHz=device's own"
    assert knob_text("clock_MHz", (1200, 1410)) == "clock_MHz=1200,1410"


def test_a_legend_explains_each_knob_once() -> None:
    legend = settings_legend(["mb16 1050MHz", "mb4 clock-auto", "no difference"])
    assert legend == "mb16 = micro-batch 16, 1050MHz = device clock"
    assert settings_legend(["clock-auto"]) == "clock-auto = device clock left to the device"
    assert settings_legend(["no difference"]) == ""


def test_an_estimate_is_marked_and_a_twin_before_it() -> None:
    assert label(common_mark([NVML])) == after_comma("") == ""
    assert after_comma(common_mark([ESTIMATED])) == ", estimated"
    assert label(common_mark([NVML, ESTIMATED])) == " (estimated)"
    assert label(common_mark([TWIN, ESTIMATED, NVML])) == " (twin)"


def test_counts_and_columns() -> None:
    assert [counted(n, "node") for n in (1, 2048)] == ["1 node", "2,048 nodes"]
    rows = [["time", ""], ["12.5 s", "mb4"]]
    assert right_aligned(rows, indent="  ") == ["    time", "  12.5 s  mb4"]
