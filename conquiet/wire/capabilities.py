"""What differs between servers, in one place: how they refuse, what they leave out, and what one node allows.

Nothing is concluded from a version: Valkey says 7.2.4, and managed services forbid what their version has. A node is
asked by the command itself, once, and answers are told apart by what they hold. A newer command enters here, with the
portable way beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from conquiet.wire.parser import Reply

__all__ = [
    "Capabilities",
    "has_group_already",
    "is_demoted",
    "is_forbidden",
    "is_full",
    "is_group_lost",
    "is_no_stream",
    "is_noscript",
    "lag_of",
    "node_in_doubt",
    "still_there",
]

_IN_DOUBT: Final = (OSError, RedisConnectionError, ReadOnlyError, ClusterDownError, MasterDownError)
_PROBE: Final = ("CLIENT", "UNBLOCK", 0)
"""Asks whether a blocked client may be woken: no client has that ID."""


class Capabilities:
    """What one node allows, as it has told itself."""

    def __init__(self) -> None:
        self.can_unblock: bool | None = None
        """Whether ``CLIENT UNBLOCK`` wakes a blocked command; ``None`` until it was asked. Memorystore has no such
        command, and users may lack the right."""

    def questions(self) -> tuple[tuple[str | int, ...], ...]:
        """The commands that tell what is not known yet; they change nothing."""
        return (_PROBE,) if self.can_unblock is None else ()

    def learn(self, replies: list[Reply]) -> None:
        """Take in the replies to :meth:`questions`."""
        for reply in replies:
            if isinstance(reply, int):
                self.can_unblock = True
            elif is_forbidden(reply):
                self.can_unblock = False


# --- how servers refuse -----------------------------------------------------------------------------------------


def is_noscript(reply: Reply) -> bool:
    """Whether the server refused a call because it has never seen the script."""
    return isinstance(reply, Exception) and (type(reply).__name__ == "NoScriptError" or "NOSCRIPT" in str(reply))


def is_group_lost(error: object) -> bool:
    """Whether the server refused a command because the group, or its stream, does not exist."""
    return "NOGROUP" in str(error)


def has_group_already(reply: Reply) -> bool:
    """Whether a group was not created because it exists."""
    return isinstance(reply, Exception) and str(reply).startswith("BUSYGROUP")


def is_no_stream(error: object) -> bool:
    """Whether the server refused a command because the key holds something else."""
    return str(error).startswith("WRONGTYPE")


def is_forbidden(reply: Reply) -> bool:
    """Whether the user may not run the command, or the server does not have it."""
    if isinstance(reply, NoPermissionError):
        return True
    return isinstance(reply, ResponseError) and str(reply).lower().startswith(("unknown command", "unknown subcommand"))


def is_full(error: object) -> bool:
    """Whether the server refused a command because its memory is full."""
    return isinstance(error, OutOfMemoryError)


def is_demoted(reply: Reply) -> bool:
    """Whether a replica refused to write; Redis 6.2 says so, of a script, in an error of another kind."""
    return isinstance(reply, ReadOnlyError) or (isinstance(reply, Exception) and "-READONLY" in str(reply))


def node_in_doubt(reply: Reply) -> bool:
    """Whether what was said, or that nothing was, lets one ask anew which node it should be."""
    return isinstance(reply, Exception) and (isinstance(reply, _IN_DOUBT) or is_demoted(reply))


# --- what they leave out ----------------------------------------------------------------------------------------


def lag_of(group: Mapping[str, Any]) -> int | None:
    """How many entries a group has not been given, of its row of ``XINFO GROUPS``.

    Redis 6.2 does not have the field. Redis 7 and Valkey leave it empty when an entry in the middle was removed.
    """
    lag = group.get("lag")
    return lag if isinstance(lag, int) else None


def still_there(entry: Reply) -> bool:
    """Whether a row of ``XCLAIM`` is an entry: Redis 6.2 has a hole there for one that was deleted."""
    return entry is not None and entry[1] is not None
