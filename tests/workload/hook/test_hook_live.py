"""The hook's live knobs: set between steps, read back, and applied once outside a probe."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tuner.workload.hook import live, state


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    kept = dict(state.options)
    yield
    state.forget_live()
    state.options.clear()
    state.options.update(kept)
    state.link = None


def test_values_are_set_and_read_back() -> None:
    state.link = SimpleNamespace(steps=0)  # type: ignore[assignment]
    seen: list[int] = []
    live("workers", seen.append, lambda: seen[-1] if seen else 2)
    live("silent", seen.append)
    assert state.present_values() == {"workers": 2, "silent": None}
    assert state.set_values({"workers": 4}) == {"read": {"workers": 4}}
    assert state.set_values({"silent": 1}) == {"read": {}}
    assert seen == [4, 1]


def test_a_refusal_and_an_unknown_knob_are_sentences() -> None:
    def refuse(value: int) -> None:
        raise ValueError("too many\nlines")

    live("workers", refuse)
    refused = state.set_values({"workers": 4})["refused"]
    assert refused == "the script's function for workers refused 4: ValueError: too many"
    assert "not registered a live knob 'other'" in state.set_values({"other": 1})["refused"]


def test_outside_a_probe_the_chosen_value_is_set_at_once() -> None:
    seen: list[int] = []
    live("workers", seen.append)
    state.options["live"] = {"workers": 8}
    live("workers", seen.append)
    assert seen == [8]
    state.link = SimpleNamespace(steps=0)  # type: ignore[assignment]
    live("workers", seen.append)
    assert seen == [8]
