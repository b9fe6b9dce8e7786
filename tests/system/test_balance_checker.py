"""The judge of the log finds what it is there to find."""

from __future__ import annotations

from pathlib import Path

from tests.system.balance_log import Log, Note, Pen, two_at_once


def acts(name: str, at: int, **held: int) -> Note:
    return Note(name, "acts", at, detail=held)


def test_owners_one_after_the_other_are_no_offence() -> None:
    notes = [acts("b", 30, s=2), acts("a", 10, s=1, t=5), acts("a", 20, s=1, t=5), acts("a", 40, t=5)]
    assert two_at_once(notes) == []


def test_an_old_owner_who_acts_after_the_new_one_is_found() -> None:
    [wrong] = two_at_once([acts("a", 10, s=1), acts("b", 20, s=2), acts("a", 21, s=1)])
    assert wrong == "s: a in epoch 1 at 21, b in 2 at 20"


def test_two_in_one_epoch_are_found() -> None:
    assert len(two_at_once([acts("a", 10, s=1), acts("b", 20, s=1)])) == 1


def test_what_was_noted_is_read_and_the_rest_of_a_line_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = Log(path)
    assert log.read() == []
    pen = Pen(str(path), "a")
    pen.note("added", 1, "a stream", 7)
    pen.note("added", 2, "other", 8)
    pen.note("disowned", 3, "a stream", 6, "not this epoch")
    assert log.held("a") == {"a stream": 7, "other": 8}
    with path.open("a") as file:
        file.write('["a", "disowned", 4, "other", 8')
    assert len(log.read()) == 3
    with path.open("a") as file:
        file.write(', "gone"]\n')
    assert log.held("a") == {"a stream": 7}
    assert log.noted("disowned", "a")[-1].detail == "gone"
    assert log.noted("disowned", "b") == []
