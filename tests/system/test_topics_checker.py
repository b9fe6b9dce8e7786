"""The judge of the logs finds what is wrong, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.system.topics_log import Disturbance, Log, Pen, Record, check

SENT = [("a", 1), ("a", 2), ("b", 1)]
GOOD = [
    Record("x#1", 0, 1, "1-0", "a", 1, 0, 100, 110, "done"),
    Record("x#1", 0, 1, "2-0", "b", 1, 0, 105, 120, "done"),
    Record("y#1", 0, 2, "3-0", "a", 2, 0, 130, 140, "done"),
]
AGAIN = Record("y#1", 0, 2, "2-0", "b", 1, 0, 130, 140, "done")
"""The second message once more, by the next owner."""


def stopped(at: int = 107, *held: str) -> Disturbance:
    return Disturbance("stop", "x#1", at, frozenset((0, id) for id in held))


def killed(at: int = 107, *held: str) -> Disturbance:
    return Disturbance("kill", "x#1", at, frozenset((0, id) for id in held))


def kinds(complaints: list[str]) -> set[str]:
    return {complaint.partition(":")[0] for complaint in complaints}


def test_a_good_log_is_good() -> None:
    assert check(SENT, GOOD) == []


def test_a_lost_message() -> None:
    assert check(SENT, GOOD[:2]) == ["lost: ('a', 2)"]


def test_a_message_that_was_begun_and_never_handled_is_lost() -> None:
    records = [*GOOD[:2], replace(GOOD[2], end=None, outcome="")]
    assert kinds(check(SENT, records)) == {"lost", "begun and never ended"}


def test_a_message_that_only_failed_is_lost() -> None:
    assert kinds(check(SENT, [*GOOD[:2], replace(GOOD[2], outcome="failed")])) == {"lost"}


def test_a_message_that_nobody_sent() -> None:
    assert check(SENT[1:], GOOD) == ["never sent: ('a', 1)"]


def test_a_key_out_of_order() -> None:
    records = [replace(GOOD[0], seq=2), GOOD[1], replace(GOOD[2], seq=1)]
    assert kinds(check(SENT, records)) == {"out of order"}


def test_only_first_deliveries_have_to_be_in_order() -> None:
    again = replace(GOOD[0], owner="y#1", epoch=2, start=150, end=160)
    assert check(SENT, [*GOOD, again], [killed(115, "1-0")]) == []


def test_a_retry_may_come_after_later_messages_of_its_key() -> None:
    failed = replace(GOOD[0], outcome="failed")
    retried = replace(GOOD[0], owner="y#1", epoch=2, retry=1, start=150, end=160)
    assert check(SENT, [failed, *GOOD[1:], retried]) == []


def test_two_of_a_key_at_once() -> None:
    records = [*GOOD[:2], replace(GOOD[2], owner="x#1", epoch=1, start=109)]
    assert kinds(check(SENT, records)) == {"two of a key at once"}


def test_an_owner_still_at_work_when_the_next_begins() -> None:
    records = [GOOD[0], replace(GOOD[1], end=135), GOOD[2]]
    assert kinds(check(SENT, records)) == {"still at work when the next owner began"}


def test_a_stopped_owner_may_still_be_at_work() -> None:
    assert check(SENT, [GOOD[0], replace(GOOD[1], end=135), GOOD[2]], [stopped()]) == []


def test_an_owner_that_was_stopped_before_or_after_must_not_be_at_work() -> None:
    records = [GOOD[0], replace(GOOD[1], end=135), GOOD[2]]
    for at in (104, 131):
        assert kinds(check(SENT, records, [stopped(at)])) == {"still at work when the next owner began"}


def test_an_old_owner_that_begins_after_the_next() -> None:
    records = [GOOD[0], replace(GOOD[1], start=131, end=132), GOOD[2]]
    assert kinds(check(SENT, records)) == {"begun after the next owner had"}


def test_a_stop_excuses_one_late_begin_of_what_was_held() -> None:
    late = replace(GOOD[1], start=131, end=132)
    later = replace(GOOD[0], start=133, end=134)
    assert check(SENT, [GOOD[0], late, GOOD[2]], [stopped(107, "2-0")]) == []
    assert kinds(check(SENT, [GOOD[0], late, GOOD[2]], [stopped(107)])) == {"begun after the next owner had"}
    first = replace(GOOD[0], owner="y#1", epoch=2, start=125, end=126)
    complaints = check(SENT, [first, later, late, GOOD[2]], [stopped(107, "1-0", "2-0")])
    assert kinds(complaints) == {"begun after the next owner had"}
    assert len(complaints) == 1


def test_a_kill_excuses_no_late_begin() -> None:
    records = [GOOD[0], replace(GOOD[1], start=131, end=132), GOOD[2]]
    assert kinds(check(SENT, records, [killed(107, "2-0")])) == {"begun after the next owner had"}


def test_a_duplicate_without_a_cause() -> None:
    assert kinds(check(SENT, [*GOOD, AGAIN])) == {"handled 2 times at retry 0, in flight in 0 disturbances"}


def test_what_was_in_flight_may_come_again_once_for_each_disturbance() -> None:
    assert check(SENT, [*GOOD, AGAIN], [killed(121, "2-0")]) == []
    assert check(SENT, [*GOOD, AGAIN], [killed(121, "1-0")])
    third = replace(AGAIN, start=150, end=160)
    assert kinds(check(SENT, [*GOOD, AGAIN, third], [killed(121, "2-0")])) == {
        "handled 3 times at retry 0, in flight in 1 disturbances"
    }


def test_only_a_killed_owner_leaves_something_unfinished() -> None:
    records = [GOOD[0], replace(GOOD[1], end=None, outcome=""), GOOD[2], AGAIN]
    assert check(SENT, records, [killed(107, "2-0")]) == []
    assert kinds(check(SENT, records, [stopped(107, "2-0")])) == {"begun and never ended"}


def test_other_partitions_have_owners_of_their_own() -> None:
    records = [GOOD[0], replace(GOOD[1], partition=1, end=135), GOOD[2]]
    assert check(SENT, records) == []


def test_what_is_written_is_read_as_it_comes(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    assert log.read().records == []
    pen = Pen(str(log.path), "x")
    token = pen.begin(GOOD[0])
    assert log.read().records == [replace(GOOD[0], end=None, outcome="")]
    assert log.done() == set()
    pen.end(token, "done", 110)
    pen.note("owned", 111, [0, 1])
    with log.path.open("a") as file:
        file.write("note x half")  # a line that is not whole yet
        file.flush()
        assert log.read().records == GOOD[:1]
        file.write(" 112 null\n")
    assert log.done() == {("a", 1)}
    assert [note.detail for note in log.noted("x", "owned")] == [[0, 1]]
    assert [note.at for note in log.noted("x", "half")] == [112]
