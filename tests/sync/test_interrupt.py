"""Ctrl-C and SIGTERM while plain code waits."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from conquiet.sync import QueueConfig, QueueConsumer, RedisStreamsQueue
from tests.sync.looking import LONG, Eye, named, until
from tests.sync.programs import running
from tests.sync.scripts import interrupts

pytestmark = [pytest.mark.any_server, pytest.mark.slow]

INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(autouse=True)
def pythons_own_handlers() -> Iterator[None]:
    """A consumer that another test ended in a thread has left its handlers, which pass signals on."""
    before = signal.signal(INT, signal.default_int_handler), signal.signal(TERM, signal.SIG_DFL)
    yield
    for number, handler in zip((INT, TERM), before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("script", "said", "last"),
    [(interrupts.reading, "interrupted", "read 1"), (interrupts.next_message, "interrupted False", "next 1")],
    ids=["read", "next"],
)
def test_ctrl_c_ends_a_blocked_read(
    url: str, eye: Eye, config: QueueConfig, script: Callable[..., None], said: str, last: str
) -> None:
    name, url = named(url)
    with running(script, url, name, config.stream_key) as program:
        assert program.line() == "ready"
        until(lambda: eye.blocked(name) == 1, "a blocked read")
        started = time.monotonic()
        program.signal(INT)
        assert program.line() == said
        assert time.monotonic() - started < LONG
        assert program.end().went_well() == [last]
    assert eye.clients(name) == {}


def test_ctrl_c_leaves_no_read_behind_on_the_server(url: str, eye: Eye, config: QueueConfig) -> None:
    """Or it would take the next message, and nobody would handle it."""
    name, url = named(url)
    with running(interrupts.reading, url, name, config.stream_key) as program:
        until(lambda: eye.blocked(name) == 1, "a blocked read")
        torn = {id for id, row in eye.clients(name).items() if "b" in row["flags"]}
        program.signal(INT)
        assert program.line() == "ready"
        assert program.line() == "interrupted"
        until(lambda: not torn & eye.clients(name).keys(), "the end of its connection")
        assert program.end().went_well() == ["read 1"]
    assert eye.pending(config.stream_key) == []


def test_ctrl_c_waits_for_the_clean_up() -> None:
    with running(interrupts.within_cleanup) as program:
        assert program.line() == "ready"
        program.signal(INT)
        assert program.end().went_well() == ["cleaned up", "interrupted"]


def test_a_second_ctrl_c_does_not() -> None:
    with running(interrupts.second_ctrl_c) as program:
        assert program.line() == "ready"
        program.signal(INT)
        assert program.line() == "cancelled"
        program.signal(INT)
        assert program.end().went_well() == ["interrupted KeyboardInterrupt", "released"]


def test_ctrl_c_in_a_handler_rolls_back_on_the_calling_thread(url: str, config: QueueConfig) -> None:
    with running(interrupts.handling, url, config.stream_key, "False") as program:
        assert program.line() == "handling"
        program.signal(INT)
        assert program.end().went_well() == ["rollback True", "interrupted", "pending 1"]


@pytest.mark.parametrize("number", [INT, TERM])
def test_a_first_signal_lets_the_handler_finish(url: str, config: QueueConfig, number: signal.Signals) -> None:
    with running(interrupts.handling, url, config.stream_key, "True") as program:
        assert program.line() == "handling"
        program.signal(number)
        assert program.line() == "stopping"
        program.signal(USR1)
        assert program.end().went_well() == ["commit True", "pending 0"]


def test_a_second_ctrl_c_interrupts_the_handler(url: str, config: QueueConfig) -> None:
    with running(interrupts.handling, url, config.stream_key, "True") as program:
        assert program.line() == "handling"
        program.signal(INT)
        assert program.line() == "stopping"
        program.signal(INT)
        assert program.end().went_well() == ["rollback True", "interrupted", "pending 1"]


def test_a_second_sigterm_ends_the_process(url: str, eye: Eye, config: QueueConfig) -> None:
    with running(interrupts.handling, url, config.stream_key, "True") as program:
        assert program.line() == "handling"
        program.signal(TERM)
        assert program.line() == "stopping"
        program.signal(TERM)
        assert program.end().code == -TERM
    assert len(eye.pending(config.stream_key)) == 1


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize("entered", [True, False], ids=["entered", "bare"])
def test_a_signal_ends_an_iteration(
    url: str, eye: Eye, config: QueueConfig, number: signal.Signals, entered: bool
) -> None:
    name, url = named(url)
    with running(interrupts.iterating, url, config.stream_key, str(entered)) as program:
        assert program.line() == "got 1"
        until(lambda: eye.blocked(name) == 1, "a blocked read")
        program.signal(number)
        assert program.end().went_well() == ["ended True", "pending 1", "signals as before True"]


# --- without a signal -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entered", [True, False], ids=["entered", "bare"])
def test_break_closes_the_iterator(queue: RedisStreamsQueue, entered: bool) -> None:
    queue.enqueue_many({"n": n} for n in range(3))
    before = signal.getsignal(INT), signal.getsignal(TERM)
    consumer = QueueConsumer(queue)
    if entered:
        consumer.__enter__()
    within = signal.getsignal(INT), signal.getsignal(TERM)
    assert (within == before) is not entered
    for message in consumer.iter_messages():
        assert (signal.getsignal(INT), signal.getsignal(TERM)) != within
        assert message.payload == {"n": 0}
        break
    assert (signal.getsignal(INT), signal.getsignal(TERM)) == within
    assert not consumer.stopping
    assert [message.payload["n"] for message, _ in zip(consumer.iter_messages(), range(1), strict=False)] == [1]
    if entered:
        consumer.__exit__(None, None, None)
        assert consumer.stopping
    assert (signal.getsignal(INT), signal.getsignal(TERM)) == before


def test_stop_from_another_thread_ends_an_iteration(url: str, eye: Eye, config: QueueConfig) -> None:
    name, url = named(url)
    with RedisStreamsQueue.connect(url, QueueConfig(config.stream_key, "group", "c", block_ms=60_000)) as queue:
        consumer = QueueConsumer(queue)

        def stop() -> None:
            until(lambda: eye.blocked(name) == 1, "a blocked read")
            consumer.stop()

        thread = threading.Thread(target=stop)
        thread.start()
        assert list(consumer.iter_messages()) == []
        thread.join()
        assert consumer.next() is None


def test_signals_are_left_alone_in_other_threads(queue: RedisStreamsQueue) -> None:
    before = signal.getsignal(INT), signal.getsignal(TERM)
    id = queue.enqueue({"n": 1})

    def consume() -> str:
        with QueueConsumer(queue) as consumer:
            for message in consumer.iter_messages():
                assert (signal.getsignal(INT), signal.getsignal(TERM)) == before
                consumer.ack(message)
                return message.id
        raise AssertionError

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(consume).result(LONG) == id


def test_a_consumer_that_handles_no_signals_installs_nothing(queue: RedisStreamsQueue) -> None:
    before = signal.getsignal(INT), signal.getsignal(TERM)
    queue.enqueue({"n": 1})
    with QueueConsumer(queue, handle_signals=False) as consumer:
        for _ in consumer.iter_messages():
            assert (signal.getsignal(INT), signal.getsignal(TERM)) == before
            consumer.stop()
