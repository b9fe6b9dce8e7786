"""Every exception that conquiet raises.

::

    ConquietError
     ├── QueueError                     the server, or the way to it, failed; ``__cause__`` says how
     │    └── MalformedMessageError     an entry does not hold what its writer promised
     └── ConfigError                    what the caller passed cannot be meant (also a ``ValueError``)
          └── PayloadError              a payload that JSON would change or cannot carry

A ``QueueError`` never says whether trying again may help: that is the caller's policy. Nothing in the
library retries behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ConfigError", "ConquietError", "MalformedMessageError", "PayloadError", "QueueError"]


class ConquietError(Exception):
    """The root of the tree: ``except ConquietError`` catches whatever the library raises."""


class QueueError(ConquietError):
    """A backend refused, failed or went away; the driver's own exception is the ``__cause__``.

    ``entry_ids`` tells how far a write of many got: one place for each payload, in order, with the ID
    that the server confirmed, or ``None`` where it confirmed none (refused, or the answer never came).
    """

    def __init__(self, message: str, *, entry_ids: Sequence[str | None] = ()) -> None:
        super().__init__(message)
        self.entry_ids = tuple(entry_ids)


class MalformedMessageError(QueueError):
    """An entry is not exactly one field ``data`` that holds a JSON object.

    Raised when its payload is touched, not when it is read: the entry can still be acknowledged, and its
    neighbours in a batch are unharmed. ``fields`` is the entry as it is in Redis: names and values in turn.
    """

    def __init__(self, stream: str, id: str, fields: Sequence[bytes], reason: str) -> None:
        super().__init__(f"entry {id} of stream {stream!r} is malformed: {reason}")
        self.stream = stream
        self.id = id
        self.fields = tuple(fields)
        self.reason = reason

    def __reduce__(self) -> tuple[type[MalformedMessageError], tuple[str, str, tuple[bytes, ...], str]]:
        return type(self), (self.stream, self.id, self.fields, self.reason)


class ConfigError(ConquietError, ValueError):
    """A setting, name or argument is outside its rule; the message names the value and the rule."""


class PayloadError(ConfigError):
    """A payload would not come back equal to what was sent; ``path`` names the place, as in ``$.a[3]``."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"payload cannot be carried as JSON: {path} {reason}")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type[PayloadError], tuple[str, str]]:
        return type(self), (self.path, self.reason)
