"""What worker processes note outside of the library.

Each process appends to a file of its own: a kill may cut its last line short, and that one is not read. Times are
microseconds of the machine's clock, which is that of the servers too, since they run on it. Whatever may end with a
kill in the middle is two lines, before and after.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeAlias

__all__ = ["Claim", "Disturbance", "Log", "Note", "Pen", "Run", "Saying", "now"]

Answer: TypeAlias = Literal["applied", "stale", ""]
"""What the store said; empty if its answer did not come, or nobody was left to note it."""


def now() -> int:
    """The time of this machine in microseconds."""
    return time.time_ns() // 1000


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that the store leased; ``at_ms`` is the store's own time."""

    owner: str
    job: str
    token: int
    attempts: int
    at_ms: int


@dataclass(slots=True)
class Run:
    """One call of a handler."""

    owner: str
    job: str
    token: int
    attempts: int
    start: int
    end: int | None = None
    outcome: str = ""
    """``done``, ``failed`` or ``cancelled``; empty if the handler never ended."""


@dataclass(slots=True)
class Saying:
    """What a worker said of a job to the store: that it is settled (``ack``, ``retry``...), or ``renew``.

    Renewals are noted only where they were refused.
    """

    owner: str
    job: str
    token: int
    kind: str
    asked: int
    answer: Answer = ""


@dataclass(frozen=True, slots=True)
class Note:
    """Something else that a process had to say."""

    name: str
    what: str
    at: int
    detail: Any


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A worker was killed, stopped, or told to leave; or, with no owner, the store was out of reach."""

    kind: Literal["kill", "stop", "leave", "outage"]
    owner: str
    at: int
    until: int | None = None
    """``None`` is for ever."""

    def hits(self, owner: str, start: int, end: int | None) -> bool:
        """Whether it fell upon what ``owner`` did from ``start`` to ``end``."""
        is_meant = self.kind == "outage" or self.owner == owner
        return is_meant and (end is None or self.at <= end) and (self.until is None or self.until >= start)


# --- writing -----------------------------------------------------------------------------------------------------


class Pen:
    """Writes the lines of one process, from any of its threads."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._numbers = count()

    def claimed(self, jobs: Sequence[tuple[str, int, int, int]]) -> None:
        """Jobs were leased: ID, token, attempts, when."""
        self._write("claim", jobs)

    def begin(self, job: str, token: int, attempts: int) -> int:
        """A handler begins; the number to end it by."""
        number = next(self._numbers)
        self._write("begin", number, job, token, attempts, now())
        return number

    def end(self, number: int, outcome: str) -> None:
        self._write("end", number, outcome, now())

    def say(self, words: Sequence[tuple[str, int, str]]) -> int:
        """The store is about to be told: ID, token, kind; the number to note its answer by."""
        number = next(self._numbers)
        self._write("say", number, now(), words)
        return number

    def said(self, number: int, answers: Sequence[bool]) -> None:
        self._write("said", number, answers)

    def refused(self, leases: Sequence[tuple[str, int]]) -> None:
        """Leases could not be renewed: ID, token."""
        self._write("refused", now(), leases)

    def note(self, what: str, detail: Any = None) -> None:
        self._write("note", what, now(), detail)

    def _write(self, *words: object) -> None:
        os.write(self._file, json.dumps(words, separators=(",", ":")).encode() + b"\n")


# --- reading -----------------------------------------------------------------------------------------------------


@dataclass
class Log:
    """The logs in a directory as far as they were read; ``read`` goes on from there."""

    directory: Path
    claims: list[Claim] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    sayings: list[Saying] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    """The jobs of which a worker has told the end, whatever the store said."""
    tokens: dict[str, int] = field(default_factory=dict)
    """The highest token under which each job was claimed."""
    _open: dict[tuple[str, int], Run] = field(default_factory=dict)
    _said: dict[tuple[str, int], list[Saying]] = field(default_factory=dict)
    _at: dict[str, int] = field(default_factory=dict)

    def path(self, name: str) -> str:
        """Where the process of that name writes."""
        return str(self.directory / f"{name}.log")

    def read(self) -> Log:
        """Take in what was written since."""
        for path in sorted(self.directory.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._at.get(path.stem, 0))
                text = file.read()
            whole = text.rfind(b"\n") + 1
            self._at[path.stem] = self._at.get(path.stem, 0) + whole
            for line in text[:whole].splitlines():
                self._take_in(path.stem, *json.loads(line))
        return self

    def _take_in(self, owner: str, kind: str, *words: Any) -> None:
        match kind, words:
            case "claim", (jobs,):
                claims = [Claim(owner, *job) for job in jobs]
                self.claims += claims
                self.tokens.update((one.job, max(one.token, self.tokens.get(one.job, 0))) for one in claims)
            case "begin", (number, job, token, attempts, at):
                run = self._open[owner, number] = Run(owner, job, token, attempts, at)
                self.runs.append(run)
            case "end", (number, outcome, at):
                run = self._open.pop((owner, number))
                run.outcome, run.end = outcome, at
            case "say", (number, at, said):
                sayings = [Saying(owner, job, token, what, at) for job, token, what in said]
                self._said[owner, number] = sayings
                self.sayings += sayings
                self.told.update(one.job for one in sayings if one.kind in ("ack", "fail"))
            case "said", (number, answers):
                self._answer(self._said.pop((owner, number)), answers)
            case "refused", (at, leases):
                self.sayings += [Saying(owner, job, token, "renew", at, "stale") for job, token in leases]
            case "note", (what, at, detail):
                self.notes.append(Note(owner, what, at, detail))
            case _:
                raise ValueError(f"an unknown line of {owner}: {kind} {words}")

    def _answer(self, sayings: Sequence[Saying], answers: Sequence[bool]) -> None:
        for saying, is_applied in zip(sayings, answers, strict=True):
            saying.answer = "applied" if is_applied else "stale"

    # --- asking ------------------------------------------------------------------------------------------------

    def noted(self, name: str, what: str) -> list[Note]:
        """What one process noted under ``what``, so far."""
        return [note for note in self.read().notes if (note.name, note.what) == (name, what)]

    def runs_of(self, name: str) -> list[Run]:
        """The handler calls of one process, so far."""
        return [run for run in self.read().runs if run.owner == name]

    def open_runs(self, name: str) -> list[Run]:
        """Those of them that have not ended."""
        self.read()
        return [run for (owner, _), run in self._open.items() if owner == name]

    def said_by(self, name: str, answer: Answer) -> list[tuple[str, str]]:
        """What one process said to which the store gave that answer: kind and job."""
        found = [one for one in self.read().sayings if (one.owner, one.answer) == (name, answer)]
        return sorted((one.kind, one.job) for one in found)
