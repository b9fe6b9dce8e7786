"""What becomes of a failed try, how long a retry waits, and how a claim's places are shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conquiet.errors import ConfigError, Reject, Retry
from conquiet.jobs.job import Job, JobState
from conquiet.jobs.policy import Shares, described, judge, shares
from conquiet.kit.policy import Backoff, RetryPolicy

POLICY: Final = RetryPolicy()


def held(attempts: int = 1, max_retries: int | None = None) -> Job:
    return Job(
        id="j",
        queue="q",
        raw=b"1",
        state=JobState.IN_FLIGHT,
        attempts=attempts,
        lease_token=7,
        max_retries=max_retries,
    )


def raised(error: BaseException) -> BaseException:
    """The same with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


# --- how often --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attempts", "kind"), [(1, "retry"), (2, "retry"), (3, "retry"), (4, "fail"), (5, "fail")])
def test_there_are_four_attempts_by_default(attempts: int, kind: str) -> None:
    """spec 5: Retry Cap: initial attempt + 3 retries = 4 total attempts maximum."""
    verdict = judge(held(attempts), "no", POLICY)
    assert (verdict.kind, verdict.job_id, verdict.token) == (kind, "j", 7)


@pytest.mark.parametrize(("own", "policy", "kind"), [(0, 3, "fail"), (1, 0, "retry"), (None, 0, "fail")])
def test_a_jobs_own_limit_wins(own: int | None, policy: int, kind: str) -> None:
    assert judge(held(1, own), "no", RetryPolicy(max_retries=policy)).kind == kind


# --- after which delay ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempts", "longest"), [(1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (7, 30.0), (8, 30.0), (2000, 30.0)]
)
@pytest.mark.parametrize("chance", [0.0, 0.25, 0.999])
def test_the_delay_is_anything_between_nothing_and_the_doubled_base(
    attempts: int, longest: float, chance: float
) -> None:
    """spec 5: Backoff: delay = random(0, min(base * 2^attempt, max)), base 500 ms, max 30 s; 0 for the first retry."""
    verdict = judge(held(attempts), "no", RetryPolicy(max_retries=9999), lambda: chance)
    assert verdict.delay_ms == round(chance * longest * 1000)


def test_delays_are_spread_over_the_whole_range() -> None:
    """spec 5: Jitter: full jitter to prevent thundering herds."""
    delays = [judge(held(3), "no", POLICY).delay_ms for _ in range(500)]
    assert 0 <= min(delays) < 400
    assert 1600 < max(delays) <= 2000


@pytest.mark.parametrize(("kind", "delays"), [("fixed", [500, 500, 500]), ("exponential", [500, 1000, 1500])])
def test_delays_without_chance(kind: Any, delays: list[int]) -> None:
    retry = RetryPolicy(backoff=Backoff(base=0.5, cap=1.5, kind=kind))
    assert [judge(held(attempts), "no", retry, _never).delay_ms for attempts in (1, 2, 3)] == delays


def _never() -> float:
    raise AssertionError("no chance was asked for")


def test_a_handler_may_say_how_long() -> None:
    assert judge(held(), Retry("later", delay=12.5), POLICY).delay_ms == 12_500
    assert judge(held(), Retry("now", delay=0), POLICY).delay_ms == 0
    assert judge(held(), Retry("as usual"), POLICY, lambda: 0.5).delay_ms == 250


def test_a_delay_of_ages_is_one_that_every_store_can_keep() -> None:
    """A number that a store refuses would be refused for ever, and the job with it."""
    longest = 3650 * 86_400_000
    assert judge(held(), Retry(delay=1e18), POLICY).delay_ms <= longest
    patient = RetryPolicy(backoff=Backoff(base=1e300, cap=1e300, kind="fixed"))
    assert judge(held(), "no", patient).delay_ms <= longest


# --- which errors -----------------------------------------------------------------------------------------------------


class Hopeless(ValueError):
    """One that no retry helps against."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("x"), "retry"),
        (Hopeless("x"), "fail"),
        (ValueError("x"), "retry"),
        (Reject("x"), "fail"),
        (Retry("x"), "retry"),
        (TimeoutError("x"), "retry"),
        (KeyboardInterrupt(), "fail"),
        ("Hopeless", "retry"),
    ],
)
def test_which_errors_are_tried_again(error: BaseException | str, kind: str) -> None:
    assert judge(held(), error, RetryPolicy(give_up_on=Hopeless)).kind == kind


def test_only_some_errors_may_be_worth_a_retry() -> None:
    retry = RetryPolicy(retry_on=OSError, give_up_on=(FileNotFoundError,))
    kinds = [judge(held(), error, retry).kind for error in (OSError(), FileNotFoundError(), ValueError())]
    assert kinds == ["retry", "fail", "fail"]


def test_a_handler_that_asks_for_a_retry_gets_it_whatever_the_policy_retries_on() -> None:
    assert judge(held(), Retry("x"), RetryPolicy(retry_on=OSError)).kind == "retry"


def test_even_retry_counts_as_a_failure() -> None:
    assert judge(held(4), Retry("x", delay=1), POLICY).kind == "fail"


def test_a_reject_with_attempts_left_is_the_end() -> None:
    verdict = judge(held(1), Reject("not ours"), POLICY)
    assert (verdict.kind, verdict.delay_ms) == ("fail", 0)


# --- what is kept of an error -----------------------------------------------------------------------------------------


def test_an_error_is_kept_with_its_traceback_and_its_first_line() -> None:
    verdict = judge(held(), raised(KeyError("a\nb")), POLICY)
    assert verdict.brief == r"KeyError: 'a\nb'"
    assert verdict.error.startswith(verdict.brief)
    assert "in raised" in verdict.error


def test_the_cause_of_an_error_is_kept_too() -> None:
    error = RuntimeError("it")
    error.__cause__ = raised(OSError("the disk"))
    assert "OSError: the disk" in judge(held(), raised(error), POLICY).error


def test_a_text_is_kept_as_it_is() -> None:
    assert described("first\nsecond") == ("first\nsecond", "first")
    assert described("") == ("", "")


def test_an_error_that_was_not_raised_has_no_traceback() -> None:
    assert described(ValueError("x")) == ("ValueError: x", "ValueError: x")


def test_errors_are_cut() -> None:
    full, brief = described("x" * 100_000)
    assert (len(full), len(brief)) == (10_000, 200)


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b", "\udfff\0", "\x1b[31m\x07"])
def test_what_a_store_cannot_hold_is_replaced(text: str) -> None:
    for kept in (*described(text), *described(ValueError(text))):
        assert "\0" not in kept
        kept.encode()


def test_an_error_whose_text_cannot_be_had_is_kept_all_the_same() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert "Broken" in judge(held(), raised(Broken()), POLICY).brief


# --- shares -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "share"), [(3, 1), (4, 1), (5, 1), (9, 1), (10, 2), (14, 2), (15, 3), (1000, 200)])
@pytest.mark.parametrize("turn", range(4))
def test_a_fifth_each_and_at_least_one(count: int, share: int, turn: int) -> None:
    """10 places give 2 to retries, 4 give 1."""
    assert shares(count, turn) == Shares(share, share)


def _summed(count: int, turns: int, what: Callable[[Shares], int]) -> int:
    return sum(what(shares(count, turn)) for turn in range(turns))


@pytest.mark.parametrize("count", [1, 2])
def test_small_claims_take_turns(count: int) -> None:
    """Over many claims, each has at least a tenth of the places, and the order decides on most or half of them."""
    turns = 100
    of_retries = _summed(count, turns, lambda share: share.retries)
    of_oldest = _summed(count, turns, lambda share: share.oldest)
    assert of_retries >= count * turns // 10
    assert of_oldest >= count * turns // 10
    assert of_retries + of_oldest <= count * turns // 2


@given(count=st.integers(1, 10_000), turn=st.integers(0, 10_000))
def test_shares_never_take_all_the_places(count: int, turn: int) -> None:
    share = shares(count, turn)
    assert 0 <= share.retries + share.oldest <= max(count - 1, 1)


def test_shares_of_small_claims_never_take_all_the_places() -> None:
    """Where the rounding matters, at each turn."""
    small = [(count, turn, shares(count, turn)) for count in range(1, 40) for turn in range(12)]
    assert [one for one in small if not 0 <= one[2].retries + one[2].oldest <= max(one[0] - 1, 1)] == []


# --- the policies themselves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RetryPolicy(max_retries=-1), "max_retries must be an integer of at least 0, not -1"),
        (lambda: RetryPolicy(max_retries=True), "max_retries must be an integer of at least 0, not True"),
        (lambda: Backoff(base=-1), "base must be a finite number of at least 0, not -1"),
        (lambda: Backoff(base=2, cap=1), "cap must be a finite number of at least 2, not 1"),
        (lambda: Backoff(base=float("nan")), "base must be a finite number of at least 0, not nan"),
        (lambda: Retry(delay=-1), "delay must be a finite number of seconds of at least 0, not -1"),
    ],
)
def test_what_is_no_policy_is_refused(make: Callable[[], object], message: str) -> None:
    """Construction fails naming the field."""
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_defaults() -> None:
    """spec 5: Retry Policy: MaxRetries 3, base delay 500ms, maximum delay 30s, full jitter."""
    assert (POLICY.max_retries, POLICY.backoff) == (3, Backoff(base=0.5, cap=30.0, kind="full_jitter"))
