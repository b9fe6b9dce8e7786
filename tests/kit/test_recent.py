"""A dict that does not grow."""

from __future__ import annotations

from conquiet.kit.recent import Recent


def test_what_was_kept_longest_ago_goes_when_something_comes() -> None:
    recent = Recent[str, int](2)
    assert recent.keep("a", 1) == 1
    told = [recent.is_full]
    recent.keep("b", 2)
    told.append(recent.is_full)
    assert told == [False, True]
    recent.keep("a", 3)
    recent.keep("c", 4)
    assert recent == {"a": 3, "c": 4}


def test_a_change_in_place_moves_nothing() -> None:
    recent = Recent[str, int](2)
    recent.keep("a", 1)
    recent.keep("b", 2)
    recent["a"] += 1
    recent.keep("c", 3)
    assert recent == {"b": 2, "c": 3}
