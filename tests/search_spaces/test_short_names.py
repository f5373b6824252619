"""Short names: shown in one order, read back in any order and spelling."""

from __future__ import annotations

import random

import pytest

from tuner.formatting import settings_text, short
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, InvalidValue, UnknownName
from tuner.search_spaces.knobs import KNOBS, parse_words, split_words

TODAY = Configuration.of(data_parallel=8, micro_batch=4, zero_stage=0)
CHOICE = Configuration.of(data_parallel=8, micro_batch=16, zero_stage=1, clock_MHz=1050)


def test_knobs_come_in_one_order_without_what_is_neutral() -> None:
    assert CHOICE.short == "dp8 mb16 zero1 1050MHz"
    plain = Configuration.of(
        activation_checkpointing="none", zero_stage=0, optimizer_offload="none", data_parallel=1
    )
    assert plain.short == "dp1 zero0"
    assert Configuration.of().short == "default"
    assert short(CHOICE, baseline=TODAY) == "mb16 zero1 1050MHz dp8"
    assert short(TODAY, baseline=CHOICE) == "mb4 zero0 clock-auto dp8"
    assert settings_text(CHOICE, TODAY) == "mb16 zero1 1050MHz"
    assert short(TODAY, ["clock_MHz"]) == "clock-auto"


def test_every_configuration_is_read_back_from_its_names() -> None:
    """Random values of every knob; words shuffled, in capitals, short or KNOB=VALUE."""
    draw = random.Random(3)
    for _ in range(300):
        values = {}
        for name, knob in KNOBS.items():
            if draw.random() < 0.5:
                values[name] = draw.choice(knob.choices) if knob.choices else draw.randint(1, 999)
        if draw.random() < 0.2:
            values["clock_MHz"] = (1200, 1410)
        configuration = Configuration.of(values)
        shown = {**configuration.launch, **configuration.live}
        told = {n: v for n, v in shown.items() if v != KNOBS[n].default}
        for text in (configuration.short, configuration.key):
            words = text.replace("|", " ").split()
            draw.shuffle(words)
            read = Configuration.parse(" ".join(words) if words != ["default"] else "")
            assert {n: read.get(n) for n in KNOBS} == {n: configuration.get(n) for n in KNOBS}
            if text == configuration.short and text != "default":
                assert Configuration.parse(text.upper()) == read
                assert told.keys() <= {*read.launch, *read.live}


def test_what_was_shown_elsewhere_is_read() -> None:
    assert Configuration.parse("dp8 mb16 | zero1 1050 MHz") == CHOICE
    assert parse_words("data_parallel=8 clock_MHz=device's own") == {
        "data_parallel": 8,
        "clock_MHz": None,
    }
    assert Configuration.parse("300W mem5001MHz") == Configuration.of(
        power_limit_W=300, memory_clock_MHz=5001
    )
    assert Configuration.parse("ckpt-every8") == Configuration.parse("ckpt-every_8")


@pytest.mark.parametrize(
    ("text", "error", "sentence"),
    [
        ("dp8 mb16 zero7", InvalidValue, "zero_stage is 7; it must be one of 0, 1, 2, 3"),
        ("dp8 fast", InputError, "'fast' is not a knob; write KNOB=VALUE or a short name such as"),
        ("mb4 micro_batch=8", InputError, "micro_batch is given twice, as mb4 and mb8"),
        ("microbatch=4", UnknownName, "did you mean 'micro_batch'"),
        ("dp0", InvalidValue, "data_parallel is 0"),
    ],
)
def test_a_name_that_is_none_is_answered_in_a_sentence(text, error, sentence) -> None:
    with pytest.raises(error, match=sentence.replace("?", r"\?")):
        Configuration.parse(text)


def test_what_stands_before_a_value_names_its_knob() -> None:
    told = parse_words("mb=16 zero=3 ckpt=full MEM=1593")
    assert told == parse_words("mb16 zero3 ckpt-full mem1593MHz")
    assert parse_words("mb=16", standard=False) == {"mb": "16"}  # a knob of the user's


def test_the_words_of_a_command_are_told_apart() -> None:
    words = ["opt-350m", "dp8 mb4", "zero_stage=1", "cpu-2", "1050MHz", "mine.json"]
    assert split_words(words) == (
        ["opt-350m", "cpu-2", "mine.json"],
        ["dp8 mb4", "zero_stage=1", "1050MHz"],
    )
