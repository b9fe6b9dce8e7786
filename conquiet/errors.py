"""Every exception that conquiet raises.

::

    ConquietError
     ├── QueueError                     the server, or the way to it, failed; ``__cause__`` says how
     │    ├── MalformedMessageError     an entry does not hold what its writer promised
     │    ├── GroupLostError            somebody removed a consumer group while it was in use
     │    └── TopicFullError            a topic that rejects writers at its limit has reached it
     ├── ConfigError                    what the caller passed cannot be meant (also a ``ValueError``)
     │    ├── PayloadError              a payload that JSON would change or cannot carry
     │    └── UnknownTopicError         there is no topic of that name
     └── LeaseError                     somebody else owns what the caller believes to own
          └── LeaseLostError            the lease went to another owner; nothing was changed

Two exceptions go the other way: a handler raises them to say what shall become of its message.

::

    Exception
     ├── Reject                         a dead letter at once
     └── Retry                          try again, counted as a failure

A ``QueueError`` never says whether trying again may help: that is the caller's policy. Nothing in the
library retries behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ConfigError",
    "ConquietError",
    "GroupLostError",
    "LeaseError",
    "LeaseLostError",
    "MalformedMessageError",
    "PayloadError",
    "QueueError",
    "Reject",
    "Retry",
    "TopicFullError",
    "UnknownTopicError",
]


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


class GroupLostError(QueueError):
    """A consumer group that was in use is gone, though its stream is there, or was deleted on purpose.

    Where it stood is not known any more, so the subscription ends rather than guess.
    """


class TopicFullError(QueueError):
    """A topic with ``on_full="reject"`` holds as much as it may, all of it unfinished; nothing was written."""


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


class UnknownTopicError(ConfigError):
    """No topic of that name was created, and no stream lies under the bare name either."""


class LeaseError(ConquietError):
    """What the caller wanted to change belongs to another owner now."""


class LeaseLostError(LeaseError):
    """The partition went to another owner meanwhile: the message will be, or was, delivered there again."""


class Reject(Exception):
    """Raised by a handler: this message is a dead letter at once, however many retries are left."""


class Retry(Exception):
    """Raised by a handler: try again, after ``delay`` seconds if given, else after the policy's backoff.

    It counts as a failure: after the last retry the message is a dead letter.
    """

    def __init__(self, reason: str = "", *, delay: float | None = None) -> None:
        super().__init__(reason)
        if delay is not None and not 0 <= delay < float("inf"):
            raise ConfigError(f"delay must be a finite number of seconds of at least 0, not {delay!r}")
        self.delay = delay
