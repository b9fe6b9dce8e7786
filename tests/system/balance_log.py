"""What consumers of balanced streams note, each line by the time of a server in microseconds, and the judge of it."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Log", "Note", "Pen", "two_at_once"]


@dataclass(frozen=True, slots=True)
class Note:
    """Something that a process had to say at a time, of one stream or of many.

    ``added``, ``expired``, ``disowned`` and ``terminated`` are events; ``acts`` says which streams it knew to be its
    own at that time, with their epochs; ``refused`` and ``accepted`` are what became of a write.
    """

    name: str
    what: str
    at: int
    stream: str = ""
    epoch: int = 0
    detail: Any = None


class Pen:
    """Writes the lines of one process, each in one write, so that lines never mix and a kill leaves whole ones."""

    def __init__(self, path: str, name: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._name = name

    def note(self, what: str, at: int, stream: str = "", epoch: int = 0, detail: Any = None) -> None:
        os.write(self._file, json.dumps([self._name, what, at, stream, epoch, detail]).encode() + b"\n")


@dataclass
class Log:
    """The log as far as it was read; ``read`` goes on from there."""

    path: Path
    notes: list[Note] = field(default_factory=list)
    _at: int = 0

    def read(self) -> list[Note]:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._at)
                text = file.read()
            whole = text.rfind(b"\n") + 1
            self._at += whole
            self.notes += [Note(*json.loads(line)) for line in text[:whole].splitlines()]
        return self.notes

    def noted(self, what: str, *names: str) -> list[Note]:
        """What was noted under ``what``, by all or by some."""
        return [note for note in self.read() if note.what == what and (not names or note.name in names)]

    def held(self, name: str) -> dict[str, int]:
        """The streams and epochs that a consumer was told to own and not told to have lost."""
        found: dict[str, int] = {}
        for note in self.read():
            if note.name == name and note.what == "added":
                found[note.stream] = note.epoch
            elif note.name == name and note.what == "disowned" and found.get(note.stream) == note.epoch:
                del found[note.stream]
        return found


def two_at_once(notes: Iterable[Note]) -> list[str]:
    """Every case in which somebody acted as the owner of a stream after another had in a later epoch.

    Also two who acted in one epoch.
    """
    wrong: list[str] = []
    latest: defaultdict[str, tuple[int, str, int]] = defaultdict(lambda: (0, "", 0))
    for note in sorted((note for note in notes if note.what == "acts"), key=lambda note: note.at):
        for stream, epoch in note.detail.items():
            before, who, when = latest[stream]
            if epoch < before or (epoch == before and who != note.name):
                wrong.append(f"{stream}: {note.name} in epoch {epoch} at {note.at}, {who} in {before} at {when}")
            else:
                latest[stream] = (epoch, note.name, note.at)
    return wrong
