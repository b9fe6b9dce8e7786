"""One job for a unique key: what producers ask for, and what a store is told of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from conquiet.kit import codec, rules

__all__ = ["Hold", "Mode", "Unique", "held_by"]

Mode: TypeAlias = Literal["F", "S", "W"]
"""How long a job has its unique key: until it has finished, until it was started, or for a window of time."""


@dataclass(frozen=True, slots=True)
class Unique:
    """At most one job for a unique key: while it is not finished, or not started, or within ``within`` seconds.

    Without a ``key`` it is a hash of the job's task and payload; it has nothing to do with the job's own ``key``. A
    window begins when the job is enqueued, and ends by time alone: ``until`` says nothing then.

    ``on_conflict`` says what becomes of a second one: ``"raise"`` is ``DuplicateJobError``, ``"existing"`` gives the ID
    of the first, ``"replace"`` cancels the first if it waits (its error is ``replaced``); if that runs or has run, it
    raises.
    """

    key: str | None = None
    within: float | None = None
    until: Literal["finished", "started"] = "finished"
    on_conflict: Literal["raise", "existing", "replace"] = "raise"

    def __post_init__(self) -> None:
        if self.key is not None:
            rules.text("key", self.key)
        if self.within is not None:
            rules.seconds("within", self.within, most=10 * rules.YEAR)
        rules.one_of("until", self.until, ("finished", "started"))
        rules.one_of("on_conflict", self.on_conflict, ("raise", "existing", "replace"))


class Hold(Struct, frozen=True, gc=False):
    """By what a new job would hold its unique key; ``key`` is a hash, of one length whatever the producer gave."""

    key: str
    mode: Mode
    within_ms: int = 0
    replaces: bool = False


def held_by(unique: Unique, task: str | None, payload: bytes) -> Hold:
    """What the store is told of ``unique``, for a job of that task and payload."""
    mode: Mode = "W" if unique.within is not None else "F" if unique.until == "finished" else "S"
    within = max(1, round((unique.within or 0) * 1000))
    return Hold(_hashed(unique.key, task, payload), mode, within, unique.on_conflict == "replace")


def _hashed(key: str | None, task: str | None, payload: bytes) -> str:
    # The order of an object's members says nothing, so it must not tell two payloads apart.
    about = ["key", key] if key is not None else ["call", task, codec.decode(payload)]
    return hashlib.blake2b(msgspec.json.encode(about, order="deterministic"), digest_size=20).hexdigest()
