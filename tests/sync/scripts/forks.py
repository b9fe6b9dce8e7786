"""A process that has used a facade, and its forked children."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from redis.asyncio import Redis

from conquiet.sync import EmbeddedRedis, QueueConsumer, QueueMessage, RedisStreamsQueue
from conquiet.sync._portal import call
from tests.sync.looking import LONG, Eye, looking, until, whatever
from tests.sync.scripts import PATIENCE, fork, join, say, watch_over

__all__ = [
    "bound_before",
    "by_multiprocessing",
    "child_of_child",
    "consuming",
    "forgetting",
    "in_a_handler",
    "in_the_middle_of_a_call",
    "own_connections",
    "server",
    "while_threads_call",
    "without_os_exit",
]

CALLS: Final = 100


def _send(queue: RedisStreamsQueue, who: str, calls: int = CALLS) -> dict[str, Any]:
    payloads = [{"who": who, "n": n} for n in range(calls)]
    return {queue.enqueue(payload): payload for payload in payloads}


def _check(eye: Eye, stream: str, mine: dict[str, Any], who: str) -> None:
    """Whether each call was answered with the ID of its own entry."""
    stored = {id: payload for id, payload in eye.payloads(stream).items() if payload["who"] == who}
    assert stored == mine, f"{who} got other replies than its own"


def _opened(url: str, stream: str, consumer: str = "consumer-1") -> RedisStreamsQueue:
    queue = RedisStreamsQueue.connect(url, whatever(stream, consumer))
    queue.open()
    return queue


def own_connections(url: str, name: str, plain_url: str, stream: str) -> None:
    """The child talks through connections of its own while it lives, and the parent keeps its own."""
    queue = _opened(url, stream)
    with looking(plain_url) as eye:
        before = set(eye.clients(name))
        assert len(before) == 1
    asked, answered = os.pipe(), os.pipe()

    def child() -> None:
        with looking(plain_url) as eye:
            mine = _send(queue, "child")
            _check(eye, stream, mine, "child")
        os.write(answered[1], b".")
        os.read(asked[0], 1)

    pid = fork(child)
    os.read(answered[0], 1)
    with looking(plain_url) as eye:
        both = set(eye.clients(name))
        assert both > before, "the child has no connection, or the parent has lost its own"
        assert len(both) == 2
        mine = _send(queue, "parent")
        _check(eye, stream, mine, "parent")
        assert set(eye.clients(name)) == both
        os.write(asked[1], b".")
        join(pid)
        until(lambda: set(eye.clients(name)) == before, "the end of the child's connection")
    say("fine")


_held: list[Any] = []


async def _forget() -> None:
    """Where a loop runs, a connection that is finalised closes itself there."""
    _held.clear()
    gc.collect()


def _forget_plainly() -> None:
    _held.clear()
    gc.collect()


def forgetting(url: str, name: str, plain_url: str, stream: str) -> None:
    """The child lets go of all it inherited and collects garbage, while the parent goes on."""
    # Without a time-out there is no timer, through which the parent's loop would keep the connections.
    client = Redis.from_url(url, socket_timeout=None)
    queue, reader = (RedisStreamsQueue(client, whatever(stream, consumer)) for consumer in ("a", "b"))
    queue.open()
    queue.enqueue({"who": "first"})
    messages = QueueConsumer(reader).iter_messages()
    next(messages)  # so that there is an iterator under way, and a second connection
    _held.extend([queue, reader, messages])
    del queue, reader, messages
    collected = os.pipe()

    def child(forget: Callable[[], object]) -> None:
        own = RedisStreamsQueue.connect(url, whatever(stream))
        own.open()
        forget()
        for n in range(20):
            own.enqueue({"who": "child", "n": n})
            gc.collect()
        os.write(collected[1], b".")
        call(_forget)
        own.enqueue({"who": "child", "n": 20})

    ways: list[Callable[[], object]] = [lambda: call(_forget), lambda: asyncio.run(_forget()), _forget_plainly]
    pids = [fork(partial(child, forget)) for forget in ways]
    mine: dict[str, Any] = {}
    with looking(plain_url) as eye:
        for _ in pids:
            os.read(collected[0], 1)
            mine |= _send(_held[0], "parent")
        join(*pids)
        mine |= _send(_held[0], "parent")
        _check(eye, stream, mine, "parent")
        assert len(_held[1].read(count=10)) == 10
        assert next(_held[2]).payload["who"]
    say("fine")


def child_of_child(url: str, name: str, plain_url: str, stream: str) -> None:
    """Three generations use one object."""
    queue = _opened(url, stream)

    def grandchild() -> None:
        with looking(plain_url) as eye:
            assert len(eye.clients(name)) == 2
            _check(eye, stream, _send(queue, "grandchild"), "grandchild")
            assert len(eye.clients(name)) == 3

    def child() -> None:
        mine = _send(queue, "child")
        pid = fork(grandchild)
        mine |= _send(queue, "child")
        join(pid)
        with looking(plain_url) as eye:
            _check(eye, stream, mine | _send(queue, "child"), "child")

    mine = _send(queue, "parent")
    pid = fork(child)
    mine |= _send(queue, "parent")
    join(pid)
    with looking(plain_url) as eye:
        _check(eye, stream, mine | _send(queue, "parent"), "parent")
    say("fine")


def while_threads_call(url: str, name: str, plain_url: str, stream: str) -> None:
    """Forks, from two threads, in the middle of other threads' calls."""
    queue = _opened(url, stream)
    end = threading.Event()

    def sending(who: str) -> dict[str, Any]:
        sent: dict[str, Any] = {}
        while not end.is_set():
            sent |= _send(queue, who, 20)
        return sent

    def reading() -> None:
        while not end.is_set():
            queue.ack(*queue.read(block_ms=20, count=50))

    def forking(who: str) -> None:
        for n in range(4):
            join(fork(partial(_child_at_work, queue, plain_url, stream, f"child {n} of {who}")))

    with ThreadPoolExecutor(8) as pool, looking(plain_url) as eye:
        senders = {who: pool.submit(sending, who) for who in ("a", "b", "c", "d")}
        readers = [pool.submit(reading) for _ in range(2)]
        other = pool.submit(forking, "other thread")
        try:
            forking("main thread")
            other.result()
        finally:
            end.set()
        for who, sender in senders.items():
            _check(eye, stream, sender.result(), who)
        for reader in readers:
            reader.result()
    say("fine")


def _child_at_work(queue: RedisStreamsQueue, url: str, stream: str, who: str) -> None:
    with looking(url) as eye:
        _check(eye, stream, _send(queue, who, 20), who)
        gc.collect()
        assert queue.backlog_stats().length


def by_multiprocessing(url: str, name: str, plain_url: str, stream: str) -> None:
    """As Python programs fork: an argument, a global and a pool."""
    context = multiprocessing.get_context("fork")
    queue = _opened(url, stream)
    mine = _send(queue, "parent")
    children = [context.Process(target=_work, args=(queue, plain_url, stream, f"child {n}")) for n in range(3)]
    for child in children:
        child.start()
    mine |= _send(queue, "parent")
    for child in children:
        child.join(LONG)
        assert child.exitcode == 0
    _held.append(queue)
    with context.Pool(2) as pool:
        ids = pool.map(_enqueue, range(10))
    with looking(plain_url) as eye:
        _check(eye, stream, mine | _send(queue, "parent"), "parent")
        _check(eye, stream, {id: {"who": "pool", "n": n} for n, id in enumerate(ids)}, "pool")
    say("fine")


def _work(queue: RedisStreamsQueue, url: str, stream: str, who: str) -> None:
    watch_over()
    with looking(url) as eye:
        _check(eye, stream, _send(queue, who), who)


def _enqueue(n: int) -> str:
    queue: RedisStreamsQueue = _held[0]
    return queue.enqueue({"who": "pool", "n": n})


def without_os_exit(url: str, name: str, plain_url: str, stream: str) -> None:
    """The child ends as a program ends, with its modules taken apart."""
    queue = _opened(url, stream)
    messages = QueueConsumer(queue).iter_messages()
    queue.enqueue({"who": "first"})
    next(messages)
    _held.extend([queue, messages])
    pids = [fork(lambda: queue.enqueue({"who": "child"}), leave=sys.exit), fork(int, leave=sys.exit)]
    mine = _send(queue, "parent")
    join(*pids)
    with looking(plain_url) as eye:
        _check(eye, stream, mine | _send(queue, "parent"), "parent")
    assert next(messages).payload["who"]
    say("fine")


def in_a_handler(url: str, name: str, plain_url: str, stream: str) -> None:
    """A handler forks, and the child uses the queue."""
    queue = _opened(url, stream)
    queue.enqueue_many({"who": "first", "n": n} for n in range(3))
    consumer = QueueConsumer(queue)

    def handler(message: QueueMessage, tx: Any) -> None:
        join(fork(lambda: queue.enqueue({"who": "child", "n": message.payload["n"]})))
        if message.payload["n"] == 2:
            consumer.stop()

    consumer.run(handler=handler, db_factory=_NoDatabase())
    with looking(plain_url) as eye:
        children = [payload["n"] for payload in eye.payloads(stream).values() if payload["who"] == "child"]
        assert (children, eye.pending(stream)) == ([0, 1, 2], [])
    say("fine")


class _NoDatabase:
    def begin(self) -> _NoDatabase:
        return self

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


def consuming(url: str, name: str, plain_url: str, stream: str) -> None:
    """A consumer goes on in the child, where nobody has stopped it."""
    queue = _opened(url, stream)
    queue.enqueue_many({"who": "first", "n": n} for n in range(4))
    with QueueConsumer(queue) as consumer:
        assert consumer.next() is not None
        consumer.stop()

        def child() -> None:
            assert not consumer.stopping
            for message in consumer.iter_messages():
                consumer.ack(message)
                if message.payload["n"] == 3:
                    consumer.stop()

        join(fork(child))
        assert consumer.stopping
    stats = queue.backlog_stats()
    assert (stats.pending, stats.length) == (1, 4)
    say("fine")


@contextmanager
def _in_the_middle_of_a_call(queue: RedisStreamsQueue, url: str, name: str) -> Iterator[None]:
    """Within the block, another thread waits for the answer to its ``enqueue``."""
    with looking(url) as eye, ThreadPoolExecutor(1) as pool:
        eye.ask("CLIENT PAUSE", PATIENCE * 1000, "WRITE")
        try:
            calling = pool.submit(queue.enqueue, {"who": "thread"})
            until(lambda: eye.blocked(name) == 1, "a call under way")
            yield
        finally:
            eye.ask("CLIENT UNPAUSE")
        assert eye.payloads(queue.config.stream_key)[calling.result()] == {"who": "thread"}


def in_the_middle_of_a_call(url: str, name: str, plain_url: str, stream: str) -> None:
    """The child does not wait for an answer that only the parent will get."""
    queue = _opened(url, stream)

    def child() -> None:
        os.read(released[0], 1)
        _child_at_work(queue, plain_url, stream, "child")

    released = os.pipe()
    with _in_the_middle_of_a_call(queue, plain_url, name):
        pid = fork(child)
    os.write(released[1], b".")
    join(pid)
    say("fine")


def bound_before(url: str, name: str, plain_url: str, stream: str) -> None:
    """Methods that were taken off the object in the parent are as good in the child as the object's own."""
    queue = _opened(url, stream)
    enqueue = queue.enqueue

    def child() -> None:
        signal.alarm(10)
        os.read(released[0], 1)
        with looking(plain_url) as eye:
            id = enqueue({"who": "child"})
            assert eye.payloads(stream)[id] == {"who": "child"}

    released = os.pipe()
    with _in_the_middle_of_a_call(queue, plain_url, name):
        pid = fork(child)
    os.write(released[1], b".")
    join(pid)
    say("fine")


def server(url: str, name: str, plain_url: str, stream: str) -> None:
    """The child has the parent's server, and does not end it."""
    with EmbeddedRedis() as embedded:
        queue = _opened(embedded.url, stream)

        def child() -> None:
            queue.enqueue({"who": "child"})
            embedded.close()
            gc.collect()

        join(fork(child), fork(lambda: queue.enqueue({"who": "child"}), leave=sys.exit))
        assert queue.backlog_stats().length == 2
        queue.close()
    say("fine")
