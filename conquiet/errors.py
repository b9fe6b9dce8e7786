"""Every exception that conquiet raises.

::

    ConquietError
     ├── QueueError                     the server, or the way to it, failed; ``__cause__`` says how
     │    ├── DataLostError             entries of a topic were removed before a Spark query had read them
     │    ├── MalformedMessageError     an entry does not hold what its writer promised
     │    ├── GroupLostError            somebody removed a consumer group while it was in use
     │    └── TopicFullError            a topic that rejects writers at its limit has reached it
     ├── ConfigError                    what the caller passed cannot be meant (also a ``ValueError``)
     │    ├── JobStateError             a job's state does not allow what was asked for; nothing was changed
     │    ├── PayloadError              a payload that JSON would change or cannot carry
     │    ├── UnknownJobError           there is no job of that ID
     │    └── UnknownTopicError         there is no topic of that name
     ├── DuplicateJobError              there is a job of that ID already
     └── LeaseError                     somebody else owns what the caller believes to own
          ├── AlreadyClaimedError       a stream that was claimed has a living owner; nothing was changed
          ├── LeaseLostError            the lease went to another owner; nothing was changed
          ├── StaleLeaseError           a job is not leased to the caller any more; nothing was changed
          └── StreamNotOwnedError       a stream is not, or no longer, the caller's; nothing was changed

Two exceptions go the other way: a handler raises them to say what shall become of its message or job.

::

    Exception
     ├── Reject                         no more tries: a dead letter, or a failed job
     └── Retry                          try again, counted as a failure

A ``QueueError`` never says whether trying again may help: that is the caller's policy. Nothing in the
library retries behind it, but for what Spark's processes read and write by ranges and chunks: to ask for those
once more does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AlreadyClaimedError",
    "ConfigError",
    "ConquietError",
    "DataLostError",
    "DuplicateJobError",
    "GroupLostError",
    "JobStateError",
    "LeaseError",
    "LeaseLostError",
    "MalformedMessageError",
    "PayloadError",
    "QueueError",
    "Reject",
    "Retry",
    "StaleLeaseError",
    "StreamNotOwnedError",
    "TopicFullError",
    "UnknownJobError",
    "UnknownTopicError",
]


_LONGEST = 2000
"""Characters of an error's text: names and values that strangers wrote are quoted, and may have megabytes."""


def shortened(text: str) -> str:
    """``text``, or its beginning and its end if it is too long for a log."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 300]} ... ({len(text)} characters) ... {text[-200:]}"


class ConquietError(Exception):
    """The root of the tree: ``except ConquietError`` catches whatever the library raises."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))


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
        self.reason = shortened(reason)
        super().__init__(f"entry {id} of stream {stream!r} is malformed: {self.reason}")
        self.stream = stream
        self.id = id
        self.fields = tuple(fields)

    def __reduce__(self) -> tuple[type[MalformedMessageError], tuple[str, str, tuple[bytes, ...], str]]:
        return type(self), (self.stream, self.id, self.fields, self.reason)


class DataLostError(QueueError):
    """Entries of a topic were removed before a Spark query had read them, and it was not told to go on without."""


class GroupLostError(QueueError):
    """A consumer group that was in use is gone, though its stream is there, or was deleted on purpose.

    Where it stood is not known any more, so the subscription ends rather than guess.
    """


class TopicFullError(QueueError):
    """A topic with ``on_full="reject"`` holds as much as it may, all of it unfinished; nothing was written."""


class ConfigError(ConquietError, ValueError):
    """A setting, name or argument is outside its rule; the message names the value and the rule."""


class JobStateError(ConfigError):
    """A job's state does not allow what was asked for, such as a replay of a job that is in flight; nothing changed."""


class PayloadError(ConfigError):
    """A payload would not come back equal to what was sent; ``path`` names the place, as in ``$.a[3]``."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = shortened(path)
        self.reason = shortened(reason)
        super().__init__(f"payload cannot be carried as JSON: {self.path} {self.reason}")

    def __reduce__(self) -> tuple[type[PayloadError], tuple[str, str]]:
        return type(self), (self.path, self.reason)


class UnknownJobError(ConfigError):
    """The queue holds no job of that ID: it never did, or its finished record is gone."""


class UnknownTopicError(ConfigError):
    """No topic of that name was created, and no stream lies under the bare name either."""


class DuplicateJobError(ConquietError):
    """A job ID is taken, until the finished job's record is removed; ``job_ids`` names all that were.

    Nothing was added by the call that was refused. ``enqueued`` are the jobs of a long list that were added before,
    in chunks that were not refused.
    """

    def __init__(self, queue: str, job_ids: Sequence[str], enqueued: Sequence[str] = ()) -> None:
        more = f" and {len(job_ids) - 1} more" if len(job_ids) > 1 else ""
        super().__init__(f"queue {queue!r} has a job with the ID {job_ids[0]!r}{more} already")
        self.queue = queue
        self.job_ids = tuple(job_ids)
        self.enqueued = tuple(enqueued)

    def __reduce__(self) -> tuple[type[DuplicateJobError], tuple[str, tuple[str, ...], tuple[str, ...]]]:
        return type(self), (self.queue, self.job_ids, self.enqueued)


class LeaseError(ConquietError):
    """What the caller wanted to change belongs to another owner now."""


class AlreadyClaimedError(LeaseError):
    """A stream that was to be claimed belongs to a consumer that is alive."""


class LeaseLostError(LeaseError):
    """The partition went to another owner meanwhile: the message will be, or was, delivered there again."""


class StaleLeaseError(LeaseError):
    """A job was claimed by another since, or is not in flight: ``job_ids`` names those that were left unchanged.

    The other jobs of the same call were changed.
    """

    def __init__(self, queue: str, job_ids: Sequence[str]) -> None:
        more = f" and {len(job_ids) - 1} more" if len(job_ids) > 1 else ""
        super().__init__(f"the lease of job {job_ids[0]!r}{more} of queue {queue!r} is not the caller's any more")
        self.queue = queue
        self.job_ids = tuple(job_ids)

    def __reduce__(self) -> tuple[type[StaleLeaseError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.queue, self.job_ids)


class StreamNotOwnedError(LeaseError):
    """A stream belongs to another consumer, or was finished or released: what was wanted with it is not done."""


class Reject(Exception):
    """Raised by a handler: no more tries, however many are left: a dead letter, or a failed job."""


class Retry(Exception):
    """Raised by a handler: try again, after ``delay`` seconds if given, else after the policy's backoff.

    It counts as a failure: after the last retry the message is a dead letter, or the job has failed.
    """

    def __init__(self, reason: str = "", *, delay: float | None = None) -> None:
        super().__init__(reason)
        if delay is not None and not 0 <= delay < float("inf"):
            raise ConfigError(f"delay must be a finite number of seconds of at least 0, not {delay!r}")
        self.delay = delay
