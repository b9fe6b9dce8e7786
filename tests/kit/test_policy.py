"""Whether to try again, how often and after which delay."""

from __future__ import annotations

import asyncio
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conquiet import ConfigError
from conquiet.kit.policy import Backoff, RetryPolicy

BASES = st.floats(0, 1e300)


def one() -> float:
    """The upper end of what ``random`` may give."""
    return 1.0


# --- Backoff -----------------------------------------------------------------------------------------


def test_the_defaults_are_half_a_second_up_to_half_a_minute_with_full_jitter() -> None:
    assert Backoff() == Backoff(base=0.5, cap=30.0, kind="full_jitter")
    assert [Backoff().delay(retry, one) for retry in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize(("part", "delay"), [(0.0, 0), (0.25, 1), (0.5, 2), (1.0, 4)])
def test_full_jitter_is_anything_up_to_the_exponential_delay(part: float, delay: float) -> None:
    assert Backoff().delay(3, lambda: part) == delay


def test_without_a_source_of_randomness_it_has_its_own() -> None:
    delays = {Backoff().delay(4) for _ in range(100)}
    assert len(delays) > 90
    assert 0 <= min(delays) <= max(delays) <= 8


def test_exponential_is_without_jitter() -> None:
    backoff = Backoff(base=1, cap=5, kind="exponential")
    assert [backoff.delay(retry, lambda: pytest.fail("not asked for")) for retry in range(5)] == [1, 2, 4, 5, 5]


def test_fixed_is_always_the_base() -> None:
    backoff = Backoff(base=2, kind="fixed")
    assert [backoff.delay(retry, lambda: pytest.fail("not asked for")) for retry in (0, 1, 9, 10_000)] == [2] * 4


def test_no_base_means_no_delay() -> None:
    assert [Backoff(base=0, kind="exponential").delay(retry) for retry in (0, 5, 10_000)] == [0, 0, 0]


@pytest.mark.parametrize("retry", [1_023, 1_024, 10_000, 10**30])
def test_huge_numbers_of_retries_stay_at_the_cap(retry: int) -> None:
    assert Backoff(base=0.5, cap=30, kind="exponential").delay(retry) == 30
    assert Backoff(base=5e-324, cap=30, kind="exponential").delay(retry + 1_100) == 30
    assert 0 <= Backoff().delay(retry) <= 30


@given(BASES, BASES, st.integers(0, 3_000), st.floats(0, 1, exclude_max=True))
def test_no_delay_is_negative_or_above_the_cap(base: float, more: float, retry: int, part: float) -> None:
    for kind in ("fixed", "exponential", "full_jitter"):
        backoff = Backoff(base, base + more, kind)
        delay = backoff.delay(retry, lambda: part)
        assert type(delay) is float
        assert 0 <= delay <= backoff.cap


@given(BASES, BASES, st.integers(0, 3_000))
def test_exponential_delays_never_shrink(base: float, more: float, retry: int) -> None:
    backoff = Backoff(base, base + more, "exponential")
    assert backoff.delay(retry) <= backoff.delay(retry + 1)


@pytest.mark.parametrize(
    "change",
    [
        {"base": -0.1},
        {"base": math.nan},
        {"base": math.inf},
        {"base": True},
        {"base": "1"},
        {"base": None},
        {"cap": 0.4},
        {"cap": -1},
        {"cap": math.inf},
        {"cap": math.nan},
        {"cap": "30"},
        {"kind": "linear"},
        {"kind": ""},
        {"kind": None},
        {"kind": ["fixed"]},
    ],
    ids=repr,
)
def test_a_backoff_outside_the_rules_is_refused_by_the_name_of_the_setting(change: dict[str, Any]) -> None:
    [(name, value)] = change.items()
    with pytest.raises(ConfigError, match=f"^{name} must be ") as caught:
        Backoff(**change)
    assert repr(value) in str(caught.value)


def test_the_cap_is_held_against_the_base() -> None:
    with pytest.raises(ConfigError, match=r"cap must be a finite number of at least 60, not 30\.0"):
        Backoff(base=60)


@pytest.mark.parametrize("retry", [-1, 1.0, True, None, "0"], ids=repr)
@pytest.mark.parametrize("kind", ["fixed", "exponential", "full_jitter"])
def test_retries_are_counted_from_nought(kind: Any, retry: Any) -> None:
    with pytest.raises(ConfigError, match="retry must be an integer of at least 0"):
        Backoff(kind=kind).delay(retry)


# --- RetryPolicy -------------------------------------------------------------------------------------


def test_the_defaults_are_three_retries_in_place_after_any_exception() -> None:
    policy = RetryPolicy()
    assert policy == RetryPolicy(3, Backoff(), "park", (Exception,), ())
    assert policy.retries(ValueError())
    assert not policy.retries(asyncio.CancelledError())
    assert not policy.retries(KeyboardInterrupt())


def test_only_what_is_listed_is_tried_again() -> None:
    policy = RetryPolicy(retry_on=(OSError, ValueError))
    assert [policy.retries(error) for error in (ConnectionError(), ConfigError(), KeyError())] == [True, True, False]


def test_giving_up_wins() -> None:
    policy = RetryPolicy(retry_on=(OSError,), give_up_on=(ConnectionError, KeyError))
    assert [policy.retries(error) for error in (OSError(), ConnectionResetError(), KeyError())] == [True, False, False]
    assert not RetryPolicy(retry_on=ConnectionError, give_up_on=OSError).retries(ConnectionError())


def test_a_lone_class_stands_for_a_tuple_of_it() -> None:
    policy = RetryPolicy(retry_on=OSError, give_up_on=KeyError)
    assert (policy.retry_on, policy.give_up_on) == ((OSError,), (KeyError,))
    assert policy == RetryPolicy(retry_on=(OSError,), give_up_on=(KeyError,))


def test_nothing_listed_means_that_nothing_is_tried_again() -> None:
    assert not RetryPolicy(retry_on=()).retries(Exception())


def test_the_mode_can_be_told() -> None:
    assert (RetryPolicy().mode, RetryPolicy(mode="requeue").mode) == ("park", "requeue")


@pytest.mark.parametrize(
    "change",
    [
        {"max_retries": -1},
        {"max_retries": 1.0},
        {"max_retries": True},
        {"max_retries": None},
        {"backoff": 0.5},
        {"backoff": None},
        {"backoff": Backoff},
        {"mode": "drop"},
        {"mode": None},
        {"retry_on": None},
        {"retry_on": "OSError"},
        {"retry_on": int},
        {"retry_on": [OSError]},
        {"retry_on": (OSError, int)},
        {"retry_on": OSError()},
        {"give_up_on": (OSError, (KeyError,))},
        {"give_up_on": None},
    ],
    ids=repr,
)
def test_a_policy_outside_the_rules_is_refused_by_the_name_of_the_setting(change: dict[str, Any]) -> None:
    [(name, value)] = change.items()
    with pytest.raises(ConfigError, match=f"^{name} must be ") as caught:
        RetryPolicy(**change)
    assert repr(value) in str(caught.value)


def test_policies_are_values() -> None:
    policy = RetryPolicy(5, Backoff(1, 2, "fixed"), "requeue", OSError, KeyError)
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(policy) == hash(RetryPolicy(5, Backoff(1, 2, "fixed"), "requeue", (OSError,), (KeyError,)))
    with pytest.raises(AttributeError):
        policy.max_retries = 0  # type: ignore[misc]
