"""Arguments are held to their rules, and a breach names the value and the rule."""

from __future__ import annotations

import math
from typing import Any

import pytest

from conquiet import ConfigError, ConquietError, QueueConfig
from conquiet.kit import rules


@pytest.mark.parametrize(("value", "least"), [(0, 0), (1, 1), (5, 1), (10**30, 1)])
def test_integers_within_the_rule_pass(value: int, least: int) -> None:
    assert rules.integer("n", value, least=least) == value


@pytest.mark.parametrize("value", [0, -1, True, False, 1.0, "1", b"1", None, [1], math.nan], ids=repr)
def test_what_is_no_positive_integer_is_named(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        rules.integer("block_ms", value, least=1)
    assert "block_ms" in str(caught.value)
    assert repr(value) in str(caught.value)
    assert "at least 1" in str(caught.value)


@pytest.mark.parametrize("value", [1, 0.001, 5.5, 10**9])
def test_seconds_are_positive_and_finite(value: float) -> None:
    result = rules.seconds("ttl", value)
    assert (result, type(result)) == (float(value), float)


@pytest.mark.parametrize("value", [0, -1, 0.0, True, math.inf, math.nan, 10**400, "5", None], ids=repr)
def test_what_is_no_duration_is_named(value: object) -> None:
    with pytest.raises(ConfigError, match="ttl must be a positive number of seconds"):
        rules.seconds("ttl", value)


@pytest.mark.parametrize("value", [0, 0.0, 0.5, 30, 10**300])
def test_numbers_are_finite(value: float) -> None:
    result = rules.number("base", value, least=0)
    assert (result, type(result)) == (float(value), float)


@pytest.mark.parametrize("value", [-1, 1.4, True, math.inf, -math.inf, math.nan, 10**400, "2", None], ids=repr)
def test_what_is_no_such_number_is_named(value: object) -> None:
    with pytest.raises(ConfigError, match=r"base must be a finite number of at least 1\.5, not ") as caught:
        rules.number("base", value, least=1.5)
    assert repr(value) in str(caught.value)


def test_a_choice_passes() -> None:
    assert rules.one_of("mode", "b", ("a", "b")) == "b"


@pytest.mark.parametrize("value", ["c", "", "A", b"a", None, ["a"], 1], ids=repr)
def test_what_is_no_choice_is_named_with_the_choices(value: object) -> None:
    with pytest.raises(ConfigError, match="mode must be one of 'a', 'b', not ") as caught:
        rules.one_of("mode", value, ("a", "b"))
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", ["a", " ", "Grüße \U0001f680", "\0"])
def test_text_that_utf8_carries_passes(value: str) -> None:
    assert rules.text("name", value) == value


@pytest.mark.parametrize("value", ["", b"a", 7, None, "\ud800"], ids=ascii)
def test_what_is_no_text_is_named(value: object) -> None:
    with pytest.raises(ConfigError, match="name must be"):
        rules.text("name", value)


@pytest.mark.parametrize(
    "change",
    [
        {"stream_key": ""},
        {"stream_key": b"bytes"},
        {"consumer_group": None},
        {"consumer_group": "\ud800"},
        {"consumer_name": ""},
        {"consumer_name": 7},
        {"block_ms": 0},
        {"block_ms": -1},
        {"block_ms": True},
        {"block_ms": 5.0},
        {"max_read_count": 0},
        {"max_read_count": "1"},
        {"claim_idle_ms": -1},
        {"claim_idle_ms": None},
    ],
    ids=ascii,
)
def test_a_configuration_outside_the_rules_is_refused_by_the_name_of_the_setting(change: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"stream_key": "s", "consumer_group": "g", "consumer_name": "c", **change}
    with pytest.raises(ConfigError, match=next(iter(change))) as caught:
        QueueConfig(**settings)
    assert isinstance(caught.value, ConquietError)
    assert isinstance(caught.value, ValueError)


def test_a_configuration_cannot_be_changed_behind_the_rules() -> None:
    config = QueueConfig("s", "g", "c")
    with pytest.raises(AttributeError):
        config.block_ms = 0  # type: ignore[misc]
