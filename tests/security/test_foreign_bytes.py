"""Whatever strangers write: a parser gives a value or its own error, and nothing else gets out."""

from __future__ import annotations

import datetime as dt
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conquiet import (
    Address,
    Backoff,
    ConfigError,
    JobSpec,
    MalformedMessageError,
    QueueConfig,
    QueueError,
    RetryPolicy,
    SubscribeOptions,
)
from conquiet.balance import ledger
from conquiet.jobs.job import Job
from conquiet.jobs.queue import _checked
from conquiet.jobs.store import Claim
from conquiet.jobs.stores._redis_records import claimed_jobs, known_jobs
from conquiet.message import Message, QueueMessage
from conquiet.spark.options import ReadOptions, WriteOptions
from conquiet.topics.codec import JsonCodec
from conquiet.topics.format import envelope
from conquiet.topics.server import dead_letters
from conquiet.topics.server.topics import Topic

NUMBERS = st.one_of(st.integers(), st.integers(10**12, 10**40), st.floats()).map(lambda value: str(value).encode())
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=10,
).map(lambda value: json.dumps(value).encode())
DEEP = st.integers(1, 5000).map(lambda depth: b"[" * depth + b"]" * depth)
VALUES = st.one_of(st.binary(max_size=60), NUMBERS, JSON, DEEP, st.just(b""))
NAMES = st.one_of(
    st.sampled_from(
        [
            *(b"data", b"payload", b"key", b"headers", b"timestamp", b"messageId", b"retryCount", b"maxRetries"),
            *(b"originalMessageId", b"replayedFrom", b"onlyGroup", b"codec", *dead_letters._META),
        ]
    ),
    st.binary(max_size=20),
)
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=16).map(lambda pairs: [word for pair in pairs for word in pair])
TEXTS = st.one_of(st.text(max_size=60), st.text('0123456789-/:{}[],"aplst', max_size=40))


@given(FIELDS)
def test_an_entry_of_a_queue(fields: list[bytes]) -> None:
    message = QueueMessage("s", "g", "1-1", fields)
    assert isinstance(message.raw, bytes)
    with suppress(MalformedMessageError):
        assert isinstance(message.payload, dict)


@given(FIELDS)
@example([b"payload", b"1", b"timestamp", b"9" * 40])
@example([b"payload", b"1", b"timestamp", b"1", b"originalMessageId", b"\xff", b"messageId", b"\xff"])
def test_an_entry_of_a_topic(entry: list[bytes]) -> None:
    message = Message.__new__(Message)
    message.topic, message.partition, message.group, message.epoch = "orders", 0, "g", 1
    try:
        envelope.fill(message, "1-1", entry, JsonCodec())
    except MalformedMessageError:
        return
    finally:
        envelope.only_group(entry)
    assert isinstance(message.headers, dict)
    assert isinstance(message.timestamp, dt.datetime)
    assert isinstance(message.original_id, str)
    assert message.message_id is None or isinstance(message.message_id, str)
    assert repr(message)


META = st.tuples(*(VALUES for _ in dead_letters._META)).map(
    lambda values: [word for pair in zip(dead_letters._META, values, strict=True) for word in pair]
)


@given(st.one_of(FIELDS, META, st.tuples(META, FIELDS).map(lambda both: both[0] + both[1])))
def test_a_dead_letter(words: list[bytes]) -> None:
    letter = dead_letters._letter(Topic("orders", 1), (b"1-1", words))
    assert letter.id == "1-1"
    assert isinstance(letter.headers, dict)
    assert letter.payload is None or repr(letter.payload)
    assert letter.key is None or isinstance(letter.key, str)


@given(VALUES)
def test_an_entry_of_the_input_of_balanced_streams(entry: bytes) -> None:
    assert isinstance(ledger._info(entry), dict)


RECORDS = st.one_of(
    st.none(),
    VALUES,
    st.lists(NUMBERS, min_size=1, max_size=8).map(lambda words: b" ".join(words) + b"\n{}"),
)


@given(st.binary(max_size=20), RECORDS.filter(lambda text: text is not None), RECORDS, RECORDS)
def test_a_job_that_was_claimed(id: bytes, first: bytes, counts: bytes | None, errors: bytes | None) -> None:
    [(_, found)] = claimed_jobs(Claim("q", "w", 1000, "c"), 10, 1, [id, first, counts, errors])
    assert isinstance(found, Job | QueueError)


@given(RECORDS, RECORDS, RECORDS, st.one_of(st.none(), NUMBERS))
def test_a_job_that_was_looked_at(
    first: bytes | None, record: bytes | None, errors: bytes | None, lease: bytes | None
) -> None:
    [found] = known_jobs("q", ["1"], [[first], [record], [errors], [lease]])
    assert found is None or isinstance(found, Job | QueueError)


SECRET = "canary-hunter2"


@given(st.sampled_from(["redis", "rediss", "unix", "redis+sentinel", "redis+cluster", "http", ""]), TEXTS, TEXTS, TEXTS)
def test_a_url(scheme: str, user: str, host: str, tail: str) -> None:
    try:
        address = Address.of(f"{scheme}://{user}:{SECRET}@{host}/{tail}")
    except ConfigError as error:
        text = f"{error} {error.__cause__}"
    else:
        text = f"{address} {address!r}"
    assert SECRET not in text or SECRET in host + tail


OPTIONS = st.dictionaries(
    st.one_of(
        st.sampled_from(["url", "topic", "startingOffsets", "startAt", "since", "until", "splits", "group", "schema"]),
        TEXTS,
    ),
    TEXTS,
    max_size=6,
)


@given(OPTIONS, st.sampled_from([ReadOptions, WriteOptions]))
def test_the_options_of_spark(options: dict[str, str], kind: Any) -> None:
    with suppress(ConfigError):
        assert kind.of({"url": "redis://a", "topic": "orders", **options})


ANYTHING: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.integers(), st.floats(), st.text(max_size=20), st.binary(max_size=20), st.just([]), st.just({})
)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (QueueConfig, ("stream_key", "consumer_group", "consumer_name", "block_ms", "max_read_count")),
        (SubscribeOptions, ("batch_size", "poll_timeout", "max_inflight", "lease_ttl", "order", "start", "retry")),
        (RetryPolicy, ("max_retries", "backoff", "mode")),
        (Backoff, ("base", "cap", "kind")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@given(data=st.data())
def test_options(make: Any, names: tuple[str, ...], data: st.DataObject) -> None:
    given = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(names, ANYTHING)))
    needed = {"stream_key": "s", "consumer_group": "g", "consumer_name": "c"} if make is QueueConfig else {}
    with suppress(ConfigError):
        assert make(**{**needed, **given}) == make(**{**needed, **given})


@given(ANYTHING, ANYTHING, ANYTHING)
def test_a_job_to_be(delay: Any, priority: Any, most: Any) -> None:
    spec = JobSpec({"n": 1}, delay=delay, priority=priority, max_retries=most)
    with suppress(ConfigError):
        assert _checked(spec, "1").id == "1"
