"""The template: fetch, begin, handle, commit, acknowledge (spec 2 §1.1 and §11)."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import redis
from redis.exceptions import RedisError, ResponseError

from conquiet import ConfigError, EmbeddedRedis, MalformedMessageError, QueueConfig, QueueError, QueueMessage
from tests.contracts.flavours import Consumer, Flavour, Queue
from tests.contracts.looking import Look, recorded


@dataclass
class Journal:
    """A database that notes what is asked of it, when, and on which thread; it fails where it is told to."""

    peek: Callable[[], int] = lambda: -1
    failures: dict[str, BaseException] = field(default_factory=dict)
    steps: list[tuple[str, int]] = field(default_factory=list)
    """Each step, with how many messages were pending at that moment."""
    threads: set[int] = field(default_factory=set)

    def note(self, step: str) -> None:
        self.threads.add(threading.get_ident())
        self.steps.append((step, self.peek()))
        if step in self.failures:
            raise self.failures[step]

    @property
    def names(self) -> list[str]:
        return [step for step, _ in self.steps]

    def begin(self) -> Journal:
        self.note("begin")
        return self

    def commit(self) -> None:
        self.note("commit")

    def rollback(self) -> None:
        self.note("rollback")


@pytest.fixture
def journal(url: str, config: QueueConfig) -> Iterator[Journal]:
    """A journal that looks at the pending list, from whatever thread it is on."""
    with redis.Redis.from_url(url, protocol=2) as client:

        def pending() -> int:
            summary = client.xpending(config.stream_key, config.consumer_group)
            return int(summary["pending"])

        yield Journal(pending)


class Abort(BaseException):
    """Something that is no mere exception."""


def stopping(consumer: Consumer, after: int, journal: Journal) -> Callable[[QueueMessage, Journal], None]:
    """A handler that notes each message, and stops the consumer in the last of ``after``."""
    seen: list[str] = []

    def handler(message: QueueMessage, tx: Journal) -> None:
        assert tx is journal
        seen.append(message.id)
        journal.note("handler")
        if len(seen) == after:
            consumer.stop()

    return handler


@pytest.mark.any_server
async def test_a_handler_that_cannot_be_called_is_refused_before_anything_is_read(
    consumer: Consumer, queue: Queue, journal: Journal, look: Look
) -> None:
    """spec 2 §1.1: ``handler(msg, tx)``; what takes something else could only fail."""
    await queue.enqueue({"n": 1})

    def handler(message: QueueMessage) -> None: ...

    with pytest.raises(ConfigError, match=r"handler is called with \(message, tx\), but it is .*handler\(message\)"):
        await consumer.run(handler=handler, db_factory=journal)  # type: ignore[arg-type]
    assert journal.names == []
    assert await look.pending() == []


async def test_the_order_is_fetch_begin_handler_commit_ack(
    consumer: Consumer, queue: Queue, journal: Journal, look: Look
) -> None:
    """spec 2 §1.1: MUST NOT change the ordering, MUST NOT acknowledge before commit."""
    await queue.enqueue_many({"n": n} for n in range(2))
    await consumer.run(handler=stopping(consumer, 2, journal), db_factory=journal)
    # Pending at each step: the one message in hand, until its ack and before the next is fetched.
    once = [("begin", 1), ("handler", 1), ("commit", 1)]
    assert journal.steps == once * 2
    assert await look.pending() == []


async def test_the_commands_of_a_run_are_a_read_and_an_ack_a_message(
    consumer: Consumer, queue: Queue, journal: Journal, url: str
) -> None:
    """spec 2 §1.1, §11: fetch one message, and acknowledge it; nothing is read ahead and nothing else is sent."""
    sent = await queue.enqueue_many({"n": n} for n in range(3))
    journal.peek = lambda: 0
    async with recorded(url) as commands:
        await consumer.run(handler=stopping(consumer, 3, journal), db_factory=journal)
        seen = await commands.of()
    assert [words[0] for words in seen] == ["XREADGROUP", "XACK"] * 3
    assert [words[-1] for words in seen if words[0] == "XACK"] == sent


async def test_begin_handler_commit_and_rollback_run_on_one_thread(
    flavour: Flavour, queue: Queue, journal: Journal
) -> None:
    """spec 2 §11: with plain functions all four of them run on one thread, as SQLite demands."""
    await queue.enqueue_many({"n": n} for n in range(4))
    consumer = flavour.consumer(queue)
    seen: list[str] = []

    def handler(message: QueueMessage, tx: Journal) -> None:
        journal.note("handler")
        seen.append(message.id)
        if len(seen) == 4:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await consumer.run(handler=handler, db_factory=journal)
    assert journal.names == ["begin", "handler", "commit"] * 3 + ["begin", "handler", "rollback"]
    assert len(journal.threads) == 1


async def test_a_handlers_error_is_raised_as_it_is_after_a_rollback(
    consumer: Consumer, queue: Queue, journal: Journal, look: Look
) -> None:
    """spec 2 §1.1, §11: exceptions of user code MUST be re-raised; rollback; no ack, no retry, no swallowing."""
    sent = await queue.enqueue_many({"n": n} for n in range(2))
    problem = KeyError("the handler's own")
    journal.failures["handler"] = problem
    with pytest.raises(KeyError) as caught:
        await consumer.run(handler=stopping(consumer, 9, journal), db_factory=journal)
    assert caught.value is problem
    assert journal.steps == [("begin", 1), ("handler", 1), ("rollback", 1)]
    assert [(row.id, row.deliveries) for row in await look.pending()] == [(sent[0], 1)]
    assert await look.drain() == sent[1:]


async def test_a_failed_message_is_never_tried_again(
    flavour: Flavour, consumer: Consumer, queue: Queue, journal: Journal, look: Look
) -> None:
    """spec 2 §1.1: UNDER NO CIRCUMSTANCES SHOULD THIS LOOP RETRY A MESSAGE: not in this run and not in the next."""
    failed, other = await queue.enqueue_many({"n": n} for n in range(2))
    journal.failures["handler"] = RuntimeError()
    with pytest.raises(RuntimeError):
        await consumer.run(handler=stopping(consumer, 9, journal), db_factory=journal)
    journal.failures.clear()
    handled: list[str] = []
    again = flavour.consumer(queue)

    def handler(message: QueueMessage, tx: Journal) -> None:
        handled.append(message.id)
        again.stop()

    await again.run(handler=handler, db_factory=journal)
    assert handled == [other]
    assert await look.pending_ids() == [failed]


async def test_a_commits_error_is_raised_after_a_rollback(
    consumer: Consumer, queue: Queue, journal: Journal, look: Look
) -> None:
    """spec 2 §1.1: what the commit raises rolls back too, is raised as it is, and the message is not acknowledged."""
    sent = await queue.enqueue({"n": 1})
    problem = OSError("the database is gone")
    journal.failures["commit"] = problem
    with pytest.raises(OSError, match="the database is gone") as caught:
        await consumer.run(handler=stopping(consumer, 9, journal), db_factory=journal)
    assert caught.value is problem
    assert journal.names == ["begin", "handler", "commit", "rollback"]
    assert await look.pending_ids() == [sent]


async def test_a_begins_error_is_raised_and_there_is_nothing_to_roll_back(
    consumer: Consumer, queue: Queue, journal: Journal, look: Look
) -> None:
    """spec 2 §1.1: db_factory.begin() stands before the try: no transaction, no rollback, no ack."""
    sent = await queue.enqueue({"n": 1})
    problem = OSError("no connection")
    journal.failures["begin"] = problem
    with pytest.raises(OSError, match="no connection") as caught:
        await consumer.run(handler=stopping(consumer, 9, journal), db_factory=journal)
    assert caught.value is problem
    assert journal.names == ["begin"]
    assert await look.pending_ids() == [sent]


async def test_a_rollbacks_error_does_not_hide_the_first(
    consumer: Consumer, queue: Queue, journal: Journal, look: Look
) -> None:
    """spec 2 §1.1: best-effort rollback; do not swallow the original exception."""
    sent = await queue.enqueue({"n": 1})
    problem = ValueError("the handler's own")
    journal.failures |= {"handler": problem, "rollback": OSError("the connection is gone")}
    with pytest.raises(ValueError, match="the handler's own") as caught:
        await consumer.run(handler=stopping(consumer, 9, journal), db_factory=journal)
    assert caught.value is problem
    assert any("the connection is gone" in note for note in caught.value.__notes__)
    assert journal.names == ["begin", "handler", "rollback"]
    assert await look.pending_ids() == [sent]


async def test_whatever_a_handler_raises_is_rolled_back(
    consumer: Consumer, queue: Queue, journal: Journal, look: Look
) -> None:
    """spec 2 §1.1: guarantees rollback on exceptions where possible: of a BaseException too."""
    sent = await queue.enqueue({"n": 1})
    problem = Abort()
    journal.failures["handler"] = problem
    with pytest.raises(Abort) as caught:
        await consumer.run(handler=stopping(consumer, 9, journal), db_factory=journal)
    assert caught.value is problem
    assert journal.names == ["begin", "handler", "rollback"]
    assert len(journal.threads) == 1
    assert await look.pending_ids() == [sent]


async def test_a_malformed_message_is_the_handlers_to_meet(
    consumer: Consumer, journal: Journal, look: Look, queue: Queue
) -> None:
    """spec 2 §1.1: a MalformedMessageError out of the handler is a user exception like any other."""
    poison = await look.add(b"wrong", b"1")

    def handler(message: QueueMessage, tx: Journal) -> None:
        journal.note(str(message.payload))

    with pytest.raises(MalformedMessageError) as caught:
        await consumer.run(handler=handler, db_factory=journal)
    assert caught.value.id == poison
    assert journal.names == ["begin", "rollback"]
    assert await look.pending_ids() == [poison]


async def test_a_failing_ack_is_raised_after_the_commit_and_nothing_is_rolled_back(
    consumer: Consumer, queue: Queue, journal: Journal, look: Look, url: str
) -> None:
    """spec 2 §1.1: if ack fails, it raises QueueError and propagates; the commit has already happened."""
    await queue.enqueue({"n": 1})
    with redis.Redis.from_url(url, protocol=2) as client:

        def handler(message: QueueMessage, tx: Journal) -> None:
            journal.peek = lambda: 0
            client.delete(look.stream)
            client.set(look.stream, "a string")

        with pytest.raises(QueueError, match="WRONGTYPE") as caught:
            await consumer.run(handler=handler, db_factory=journal)
    assert isinstance(caught.value.__cause__, ResponseError)
    assert journal.names == ["begin", "commit"]


async def test_a_server_that_dies_before_the_ack_is_a_queue_error_after_the_commit(
    flavour: Flavour, mortal: EmbeddedRedis, config: QueueConfig
) -> None:
    """spec 2 §9.1, §11: Redis failures MUST propagate, here of a connection lost between commit and ack."""
    queue = await flavour.open(mortal.url, config)
    await queue.enqueue({"n": 1})
    journal = Journal(lambda: 0)

    def handler(message: QueueMessage, tx: Journal) -> None:
        os.kill(mortal.pid, signal.SIGKILL)

    with pytest.raises(QueueError) as caught:
        await asyncio.wait_for(flavour.consumer(queue).run(handler=handler, db_factory=journal), 20)
    assert isinstance(caught.value.__cause__, RedisError | OSError)
    assert journal.names == ["begin", "commit"]


async def test_a_failing_read_ends_the_run(consumer: Consumer, journal: Journal, look: Look, queue: Queue) -> None:
    """spec 2 §1.1, §9.1: Redis failures propagate as QueueError; no transaction was begun."""
    await look.redis.xgroup_destroy(look.stream, look.group)
    with pytest.raises(QueueError, match="NOGROUP"):
        await consumer.run(handler=stopping(consumer, 9, journal), db_factory=journal)
    assert journal.names == []


async def test_a_run_that_ended_in_an_error_is_not_stopped(
    flavour: Flavour, consumer: Consumer, queue: Queue, journal: Journal
) -> None:
    """spec 2 §9.1: the hosting service may react: the same consumer can be run again."""
    sent = await queue.enqueue_many({"n": n} for n in range(2))
    journal.failures["handler"] = RuntimeError()
    with pytest.raises(RuntimeError):
        await consumer.run(handler=stopping(consumer, 9, journal), db_factory=journal)
    journal.failures.clear()
    handled: list[str] = []

    def handler(message: QueueMessage, tx: Journal) -> None:
        handled.append(message.id)
        consumer.stop()

    assert not consumer.stopping
    await consumer.run(handler=handler, db_factory=journal)
    assert handled == sent[1:]
