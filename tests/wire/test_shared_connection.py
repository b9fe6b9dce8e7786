"""One connection that many share: who gets which answer, and what becomes of it when somebody leaves."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest

from conquiet import Address, ConfigError, QueueConfig, QueueError, QueueMessage, RedisStreamsQueue
from tests.conftest import Rung
from tests.rigs.asking import ask, blocked, entries, pending
from tests.rigs.proxy import Proxy
from tests.rigs.servers import on_a_port
from tests.rigs.waiting import eventually

FOREVER = 30_000


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def queue(proxy: Proxy, config: QueueConfig) -> AsyncIterator[RedisStreamsQueue]:
    async with RedisStreamsQueue.connect(proxy.url, config) as queue:
        yield queue


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- cancelled calls -------------------------------------------------------------------------------


async def test_a_cancelled_enqueue_leaves_its_answer_to_nobody(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    hold = proxy.hold(b'{"n":"cancelled"}')
    writing = asyncio.create_task(queue.enqueue({"n": "cancelled"}))
    await hold.caught.wait()
    await cancelled(writing)
    hold.release()
    second = await queue.enqueue({"n": "second"})
    written = await entries(url, config.stream_key)
    assert [payload["n"] for payload in written.values()] == ["cancelled", "second"]
    assert written[second] == {"n": "second"}
    assert (await queue.backlog_stats()).length == 2


async def test_a_cancelled_enqueue_leaves_its_answer_to_nobody_who_waited_either(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    hold = proxy.hold(b'{"n":"cancelled"}')
    writing = asyncio.create_task(queue.enqueue({"n": "cancelled"}))
    await hold.caught.wait()
    waiting = [asyncio.create_task(queue.enqueue({"n": number})) for number in range(5)]
    looking = asyncio.create_task(queue.backlog_stats())
    await asyncio.sleep(0)  # so that they stand in line
    await cancelled(writing)
    hold.release()
    ids = await asyncio.gather(*waiting)
    assert (await looking).length == 6
    written = await entries(url, config.stream_key)
    assert [written[id] for id in ids] == [{"n": number} for number in range(5)]


async def test_a_caller_who_leaves_the_line_sends_nothing(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    hold = proxy.hold(b'{"n":0}')
    calls = [asyncio.create_task(queue.enqueue({"n": number})) for number in range(3)]
    await hold.caught.wait()
    await cancelled(calls[1])
    hold.release()
    first, third = await asyncio.gather(calls[0], calls[2])
    assert await entries(url, config.stream_key) == {first: {"n": 0}, third: {"n": 2}}
    assert proxy.accepted == 1  # the connection was never in doubt


async def test_a_caller_who_leaves_a_shared_write_does_not_tear_the_others(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    first = proxy.hold(b'{"n":0}')
    shared = proxy.hold(b'{"n":1}')
    calls = [asyncio.create_task(queue.enqueue({"n": number})) for number in range(4)]
    await first.caught.wait()
    first.release()
    await shared.caught.wait()  # 1, 2 and 3 are on their way together
    await cancelled(calls[2])
    shared.release()
    ids = await asyncio.gather(calls[0], calls[1], calls[3])
    written = await entries(url, config.stream_key)
    assert [written[id]["n"] for id in ids] == [0, 1, 3]
    assert [payload["n"] for payload in written.values()] == [0, 1, 2, 3]
    assert proxy.accepted == 1


async def test_a_cancelled_enqueue_of_many_leaves_its_answers_to_nobody(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    hold = proxy.hold(b'{"n":400}')  # so that the answers before it have arrived
    writing = asyncio.create_task(queue.enqueue_many([{"n": number} for number in range(450)]))
    await hold.caught.wait()
    await cancelled(writing)
    hold.release()
    ids = await queue.enqueue_many([{"m": number} for number in range(10)])
    written = await entries(url, config.stream_key)
    assert [written[id] for id in ids] == [{"m": number} for number in range(10)]


@pytest.mark.slow
async def test_a_cancelled_read_leaves_its_messages_pending_and_to_nobody_else(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    first, second = await queue.enqueue_many([{"n": 1}, {"n": 2}])
    hold = proxy.hold(b"XREADGROUP")
    reading = asyncio.create_task(queue.read(FOREVER))
    await hold.caught.wait()
    await cancelled(reading)
    hold.release()
    assert [message.id for message in await queue.read(FOREVER)] == [second]
    assert await pending(url, config.stream_key, config.consumer_group) == [first, second]
    assert {message.id for message in await queue.claim_stale(0)} == {first, second}


async def test_a_read_that_is_cancelled_twice_leaves_its_answer_to_nobody_either(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    first, second = await queue.enqueue_many([{"n": 1}, {"n": 2}])
    hold = proxy.hold(b"XREADGROUP")
    reading = asyncio.create_task(queue.read(FOREVER))
    await hold.caught.wait()
    reading.cancel()
    await turns(3)
    await cancelled(reading)  # as a task group does to those who take their time
    hold.release()
    assert [message.id for message in await queue.read(FOREVER)] == [second]
    assert await queue.read(1) == []
    assert await pending(url, config.stream_key, config.consumer_group) == [first, second]


async def test_a_read_that_is_cancelled_while_it_waits_takes_nothing(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    reading = asyncio.create_task(queue.read(FOREVER))
    await blocked(url)
    await cancelled(reading)
    await blocked(url, 0)
    entry_id = await queue.enqueue({"n": 1})
    assert await pending(url, config.stream_key, config.consumer_group) == []
    assert [message.id for message in await queue.read(FOREVER)] == [entry_id]


async def test_a_read_that_is_timed_out_by_its_caller_is_no_different(
    url: str, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await queue.read(FOREVER)
    await blocked(url, 0)
    entry_id = await queue.enqueue({"n": 1})
    assert [message.id for message in await queue.read(FOREVER)] == [entry_id]


@pytest.mark.parametrize("command", [b"XACK", b"XPENDING", b"XCLAIM", b"XINFO"])
async def test_other_calls_that_are_cancelled(proxy: Proxy, queue: RedisStreamsQueue, command: bytes) -> None:
    await queue.enqueue({"n": 1})
    [message] = await queue.read(FOREVER)
    hold = proxy.hold(command)
    calls: dict[bytes, Callable[[], Coroutine[Any, Any, object]]] = {
        b"XACK": lambda: queue.ack(message),
        b"XPENDING": lambda: queue.claim_stale(0),
        b"XCLAIM": lambda: queue.claim_stale(0),
        b"XINFO": queue.backlog_stats,
    }
    calling = asyncio.create_task(calls[command]())
    await hold.caught.wait()
    await cancelled(calling)
    hold.release()
    stats = await queue.backlog_stats()
    assert (stats.length, stats.pending) == (1, 0 if command == b"XACK" else 1)
    assert await queue.enqueue({"n": 2})


async def test_a_call_that_is_cancelled_while_it_connects(url: str, proxy: Proxy, config: QueueConfig) -> None:
    hold = proxy.hold(b"SELECT")
    async with aclosing(RedisStreamsQueue.connect(f"{proxy.url}/3", config)) as queue:
        calling = asyncio.create_task(queue.enqueue({"n": 1}))
        await hold.caught.wait()
        await cancelled(calling)
        await eventually(lambda: proxy.open_connections == 0, "the connection is closed")
        hold.release()
        entry_id = await queue.enqueue({"n": 2})
        assert await entries(f"{url}/3", config.stream_key) == {entry_id: {"n": 2}}


# --- a crowd ---------------------------------------------------------------------------------------


async def test_everybody_in_a_crowd_gets_their_own(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig
) -> None:
    singles = [queue.enqueue({"caller": number, "part": 0}) for number in range(100)]
    batches = [queue.enqueue_many([{"caller": 100 + n, "part": part} for part in range(n)]) for n in range(20)]
    ids = [[id] for id in await asyncio.gather(*singles)] + await asyncio.gather(*batches)
    written = await entries(url, config.stream_key)
    for caller, own in enumerate(ids):
        assert [written[id] for id in own] == [{"caller": caller, "part": part} for part in range(len(own))]
    assert len(written) == 100 + sum(range(20))
    assert proxy.accepted == 1


@pytest.mark.parametrize("seed", range(5))
async def test_everybody_who_stays_gets_their_own_however_many_leave(
    url: str, proxy: Proxy, queue: RedisStreamsQueue, config: QueueConfig, seed: int
) -> None:
    chance = random.Random(seed)

    async def call(caller: int) -> list[str]:
        await turns(chance.randrange(20))
        if chance.random() < 0.2:
            await queue.backlog_stats()
        size = chance.randrange(1, 4)
        return await queue.enqueue_many([{"caller": caller, "part": part, "of": size} for part in range(size)])

    tasks = [asyncio.create_task(call(caller)) for caller in range(150)]
    leaving = chance.sample(tasks, 60)
    for task in leaving:
        await turns(chance.randrange(4))
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    written = await entries(url, config.stream_key)
    seen = [(payload["caller"], payload["part"]) for payload in written.values()]
    assert len(seen) == len(set(seen))
    for caller, outcome in enumerate(outcomes):
        if isinstance(outcome, list):
            assert [written[id]["part"] for id in outcome] == list(range(written[outcome[0]]["of"]))
            assert {written[id]["caller"] for id in outcome} == {caller}
        else:
            assert tasks[caller] in leaving
            assert isinstance(outcome, asyncio.CancelledError)
    assert (await queue.backlog_stats()).length == len(written)


async def turns(count: int) -> None:
    """Let the loop turn a few times."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(3))
async def test_no_message_is_lost_between_readers_who_come_and_go(
    url: str, queue: RedisStreamsQueue, config: QueueConfig, seed: int
) -> None:
    chance = random.Random(seed)
    ids = await queue.enqueue_many([{"n": number} for number in range(100)])
    delivered: list[QueueMessage] = []

    async def read() -> None:
        delivered.extend(await queue.read(1, chance.randrange(1, 5)))

    for _ in range(10):
        readers = [asyncio.create_task(read()) for _ in range(4)]
        for reader in chance.sample(readers, 2):
            await turns(chance.randrange(12))
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    # Whatever a reader who left had been given is still pending; nothing was given to two of them.
    while messages := await queue.read(1, 100):
        delivered.extend(messages)
    own = [message.id for message in delivered]
    assert len(own) == len(set(own))
    assert all(message.payload == {"n": ids.index(message.id)} for message in delivered)

    async def all_pending() -> bool:
        return await pending(url, config.stream_key, config.consumer_group) == ids

    await eventually(all_pending, "every entry is pending with the group")


# --- servers that go silent or away ----------------------------------------------------------------


@pytest.mark.slow
async def test_a_server_that_goes_silent_is_given_up(url: str, proxy: Proxy, config: QueueConfig) -> None:
    async with RedisStreamsQueue.connect(f"{proxy.url}?socket_timeout=1", config) as queue:
        hold = proxy.hold(b'{"n":1}')
        calls = [queue.enqueue({"n": number}) for number in range(1, 4)]
        first, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, QueueError)
        assert isinstance(first.__cause__, TimeoutError)
        assert "1 s" in str(first)
        # Those behind it went out on a new connection, and got their own answers.
        written = await entries(url, config.stream_key)
        assert [written[str(id)] for id in others] == [{"n": 2}, {"n": 3}]
        hold.release()
        fourth = await queue.enqueue({"n": 4})
        assert (await entries(url, config.stream_key))[fourth] == {"n": 4}
        assert proxy.count(b'{"n":1}') == 1


@pytest.mark.slow
async def test_a_server_that_goes_silent_while_connecting_is_given_up(proxy: Proxy, config: QueueConfig) -> None:
    hold = proxy.hold(b"SELECT")
    async with aclosing(RedisStreamsQueue.connect(f"{proxy.url}/3?socket_timeout=1", config)) as queue:
        with pytest.raises(QueueError) as caught:
            await queue.enqueue({"n": 1})
        assert isinstance(caught.value.__cause__, TimeoutError)
        hold.release()
        assert await queue.enqueue({"n": 1})


@pytest.mark.slow
async def test_a_read_may_block_for_longer_than_an_answer_may_take(proxy: Proxy, config: QueueConfig) -> None:
    async with RedisStreamsQueue.connect(f"{proxy.url}?socket_timeout=1", config) as queue:
        assert await queue.read(block_ms=1200) == []
        entry_id = await queue.enqueue({"n": 1})
        assert [message.id for message in await queue.read(FOREVER)] == [entry_id]
        assert proxy.accepted == 2  # one for what answers at once, one for reads


@pytest.mark.any_server
async def test_a_call_that_is_overdue_and_cancelled_at_once_is_cancelled(proxy: Proxy, config: QueueConfig) -> None:
    loop = asyncio.get_running_loop()
    async with RedisStreamsQueue.connect(f"{proxy.url}?socket_timeout=0.5", config) as queue:
        proxy.hold(b"XADD")
        writing = asyncio.create_task(queue.enqueue({"n": 1}))
        await eventually(lambda: proxy.count(b"XADD") == 1, "the command is on its way")
        # Both timers go off in the same turn of a loop that was kept from turning, first the lane's, then ours.
        loop.call_later(0.5, writing.cancel)
        time.sleep(0.6)  # noqa: ASYNC251
        with pytest.raises(asyncio.CancelledError):
            await writing


async def test_a_blocked_read_of_a_silent_server_is_given_up(
    proxy: Proxy, queue: RedisStreamsQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conquiet.wire.blocking_connection._WATCHDOG", 0.2)
    hold = proxy.hold(b"XREADGROUP")
    with pytest.raises(QueueError) as caught:
        await queue.read(block_ms=50)
    assert isinstance(caught.value.__cause__, TimeoutError)
    hold.release()
    monkeypatch.undo()
    entry_id = await queue.enqueue({"n": 1})
    assert [message.id for message in await queue.read(FOREVER)] == [entry_id]


async def test_a_connection_that_the_server_closed_while_idle_is_replaced(url: str, config: QueueConfig) -> None:
    async with RedisStreamsQueue.connect(url, config) as queue:
        for number in range(3):
            entry_id = await queue.enqueue({"n": number})
            [message] = await queue.read(FOREVER)
            assert message.id == entry_id
            assert await ask(url, "CLIENT", "KILL", "TYPE", "normal") >= 2
            await queue.ack(message)
        assert (await queue.backlog_stats()).pending == 0


async def test_a_connection_that_was_reset_while_idle_is_replaced(
    url: str, proxy: Proxy, queue: RedisStreamsQueue
) -> None:
    first = await queue.enqueue({"n": 1})
    await queue.read(FOREVER)
    await proxy.disconnect()
    await ask(url, "PING")  # the news of the reset has arrived before the answer to this
    second = await queue.enqueue({"n": 2})
    assert [message.id for message in await queue.read(FOREVER)] == [second]
    assert [message.id for message in await queue.claim_stale(0)] == [first, second]
    assert proxy.accepted == 4


async def test_a_blocked_read_whose_connection_is_killed_is_told(url: str, config: QueueConfig) -> None:
    async with RedisStreamsQueue.connect(url, config) as queue:
        reading = asyncio.create_task(queue.read(FOREVER))
        await blocked(url)
        await ask(url, "CLIENT", "KILL", "TYPE", "normal")
        with pytest.raises(QueueError):
            await reading
        entry_id = await queue.enqueue({"n": 1})
        assert [message.id for message in await queue.read(FOREVER)] == [entry_id]


async def test_a_server_that_is_away_for_a_while(rung: Rung, config: QueueConfig, tmp_path: Path) -> None:
    if not rung.binary:
        pytest.skip("needs a server's binary")
    server = on_a_port(rung.binary, directory=tmp_path, appendonly=True)
    # The proxy keeps its address while the server changes its port.
    async with Proxy() as proxy, aclosing(RedisStreamsQueue.connect(proxy.url, config)) as queue:
        async with server:
            proxy.lead_to(server.url)
            first = await queue.enqueue({"n": 1})
            await queue.read(FOREVER)
        with pytest.raises(QueueError):
            await queue.enqueue({"n": "nobody is there"})
        async with server:
            proxy.lead_to(server.url)
            second = await queue.enqueue({"n": 2})
            assert await entries(server.url, config.stream_key) == {first: {"n": 1}, second: {"n": 2}}
            assert [message.id for message in await queue.read(FOREVER)] == [second]
            assert await pending(server.url, config.stream_key, config.consumer_group) == [first, second]


async def test_a_server_that_restarts_between_two_calls(rung: Rung, config: QueueConfig, tmp_path: Path) -> None:
    if not rung.binary:
        pytest.skip("needs a server's binary")
    async with on_a_port(rung.binary, directory=tmp_path, appendonly=True) as server:
        port = int(server.url.rpartition(":")[2])
        queue = RedisStreamsQueue.connect(server.url, config)
        first = await queue.enqueue({"n": 1})
        await queue.read(FOREVER)
    async with on_a_port(rung.binary, directory=tmp_path, appendonly=True, port=port) as server:
        second = await queue.enqueue({"n": 2})
        assert await entries(server.url, config.stream_key) == {first: {"n": 1}, second: {"n": 2}}
        assert [message.id for message in await queue.read(FOREVER)] == [second]
        await queue.aclose()


# --- reads that block, beside everything else ------------------------------------------------------


async def test_a_blocked_read_delays_nobody(url: str, queue: RedisStreamsQueue) -> None:
    await queue.enqueue({"n": 1})
    [message] = await queue.read(FOREVER)
    readings = [asyncio.create_task(queue.read(FOREVER)) for _ in range(3)]
    await blocked(url, 3)
    await queue.ack(message)
    assert (await queue.backlog_stats()).pending == 0
    assert await queue.claim_stale(0) == []
    assert not any(reading.done() for reading in readings)
    ids = await queue.enqueue_many([{"n": number} for number in range(3)])
    # One entry each, or what was there when a reader woke: in any case every entry once.
    messages = [message for reading in readings for message in await reading]
    assert sorted(message.id for message in messages) == ids


async def test_a_hundred_callers_share_one_connection(proxy: Proxy, queue: RedisStreamsQueue) -> None:
    await asyncio.gather(*(queue.enqueue({"n": number}) for number in range(100)))
    assert (proxy.accepted, proxy.count(b"XADD")) == (1, 100)


# --- the end ---------------------------------------------------------------------------------------


async def test_a_closed_queue_has_no_connection_and_makes_none(proxy: Proxy, config: QueueConfig) -> None:
    queue = RedisStreamsQueue.connect(proxy.url, config)
    await queue.enqueue({"n": 1})
    await queue.read(FOREVER)
    await queue.aclose()
    await eventually(lambda: proxy.open_connections == 0, "all connections are closed", seconds=5)
    accepted = proxy.accepted
    for call in (queue.enqueue({"n": 2}), queue.read(FOREVER), queue.backlog_stats(), queue.claim_stale(0)):
        with pytest.raises(QueueError, match="closed"):
            await call
    await queue.aclose()
    assert proxy.accepted == accepted


async def test_a_close_ends_the_calls_that_are_on_their_way(url: str, proxy: Proxy, config: QueueConfig) -> None:
    queue = RedisStreamsQueue.connect(proxy.url, config)
    await queue.open()
    reading = asyncio.create_task(queue.read(FOREVER))
    await blocked(url)
    hold = proxy.hold(b"XINFO")
    looking = [asyncio.create_task(queue.backlog_stats()) for _ in range(3)]
    await hold.caught.wait()
    await queue.aclose()
    outcomes = await asyncio.gather(reading, *looking, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [QueueError] * 4
    await eventually(lambda: proxy.open_connections == 0, "all connections are closed", seconds=5)


@pytest.mark.parametrize("what", ["enqueue", "read"])
async def test_a_close_while_a_call_connects_leaves_no_connection(proxy: Proxy, config: QueueConfig, what: str) -> None:
    hold = proxy.hold(b"SELECT")
    queue = RedisStreamsQueue.connect(f"{proxy.url}/3", config)
    call = queue.enqueue({"n": 1}) if what == "enqueue" else queue.read(50)
    calling = asyncio.create_task(call)
    await hold.caught.wait()
    await queue.aclose()
    hold.release()
    with suppress(QueueError):  # it was there before the close, so either outcome will do
        await calling
    await eventually(lambda: proxy.open_connections == 0, "all connections are closed", seconds=5)


async def test_a_close_while_a_read_opens_its_own_connection_leaves_none(proxy: Proxy, config: QueueConfig) -> None:
    queue = RedisStreamsQueue.connect(proxy.url, config)
    await queue.open()
    hold = proxy.hold(b"$2\r\nID\r\n")  # CLIENT ID, the first thing that a reader asks
    reading = asyncio.create_task(queue.read(50))
    await hold.caught.wait()
    await queue.aclose()
    hold.release()
    with suppress(QueueError):
        await reading
    await eventually(lambda: proxy.open_connections == 0, "all connections are closed", seconds=5)


# --- without asyncio -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/m", "redis+cluster://127.0.0.1:1"]
)
@pytest.mark.parametrize("what", ["enqueue", "enqueue_many", "open", "read", "claim_stale", "backlog_stats"])
def test_without_an_asyncio_loop_every_call_says_so(url: str, what: str, config: QueueConfig) -> None:
    queue = RedisStreamsQueue(Address.of(url), config)
    arguments: dict[str, tuple[object, ...]] = {"enqueue": ({},), "enqueue_many": ([{}],)}
    call = getattr(queue, what)(*arguments.get(what, ()))
    # As trio, or anybody else who is not asyncio, would run it.
    with pytest.raises(ConfigError, match="asyncio"):
        call.send(None)
