"""Taking over what others left behind (spec 1 §5.6 and §5.7, spec 2 §10)."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from conquiet import ConfigError, QueueConfig, QueueMessage
from conquiet.queue import stale
from tests.contracts.flavours import Flavour, Queue
from tests.contracts.looking import Look, recorded

pytestmark = pytest.mark.guarantee

OLD = 100_000


async def abandoned(queue: Queue, look: Look, messages: int) -> list[str]:
    """IDs that were delivered to ``queue``'s consumer and not touched for a long time."""
    await queue.enqueue_many({"n": n} for n in range(messages))
    ids = [message.id for message in await queue.read(block_ms=1_000, count=messages)]
    await look.age(ids, OLD)
    return ids


async def test_a_claim_is_a_bounded_xpending_and_an_xclaim_with_the_idle_time(
    queue: Queue, rival: Queue, url: str, look: Look
) -> None:
    """spec 1 §5.6: uses XPENDING (bounded), then XCLAIM with min_idle_ms; Redis is authoritative on idle time."""
    ids = await abandoned(queue, look, 2)
    async with recorded(url) as commands:
        await rival.claim_stale(min_idle_ms=777, count=5)
        pending, claim = await commands.of()
    assert pending == ["XPENDING", look.stream, look.group, "-", "+", "500"]  # with IDLE, it would read the whole list
    assert claim == ["XCLAIM", look.stream, look.group, "consumer-2", "777", *ids]


async def test_a_claim_moves_ownership_and_counts_the_delivery(queue: Queue, rival: Queue, look: Look) -> None:
    """spec 1 §5.6: a claimed message is pending with the claimer, as one more delivery."""
    [id] = await abandoned(queue, look, 1)
    [message] = await rival.claim_stale(min_idle_ms=OLD // 2)
    assert (message.id, message.payload, message.delivery_count) == (id, {"n": 0}, 2)
    [row] = await look.pending()
    assert (row.id, row.consumer, row.deliveries) == (id, "consumer-2", 2)
    assert row.idle_ms < OLD // 2
    await rival.ack(message)
    assert await look.pending() == []


async def test_the_delivery_count_is_the_servers(queue: Queue, rival: Queue, look: Look) -> None:
    """spec 1 §2.3: a single entry may be delivered more than once, and each time says how often by now."""
    await queue.enqueue({"n": 1})
    counts = [message.delivery_count for message in await queue.read(block_ms=50)]
    for owner in (rival, queue, rival):
        counts += [message.delivery_count for message in await owner.claim_stale(min_idle_ms=0)]
    assert counts == [1, 2, 3, 4]
    assert [row.deliveries for row in await look.pending()] == [4]


async def test_the_minimal_idle_time_is_respected(queue: Queue, rival: Queue, look: Look) -> None:
    """spec 1 §5.6: XCLAIM with min_idle_ms: a message that somebody touched since is left alone."""
    old, young = await abandoned(queue, look, 2)
    await look.age([young], 0)
    assert [message.id for message in await rival.claim_stale(min_idle_ms=OLD // 2)] == [old]
    assert await rival.claim_stale(min_idle_ms=OLD // 2) == []
    owners = {row.id: row.consumer for row in await look.pending()}
    assert owners == {old: "consumer-2", young: "consumer-1"}


async def test_the_configured_idle_time_is_the_default(
    flavour: Flavour, url: str, config: QueueConfig, queue: Queue, look: Look
) -> None:
    """spec 1 §4.1: claim_idle_ms is what claim_stale uses unless told."""
    rival = await flavour.open(url, replace(config, consumer_name="consumer-2", claim_idle_ms=OLD * 2))
    [id] = await abandoned(queue, look, 1)
    assert await rival.claim_stale() == []
    await look.age([id], OLD * 3)
    assert [message.id for message in await rival.claim_stale()] == [id]


async def test_a_claim_takes_at_most_count(queue: Queue, rival: Queue, look: Look) -> None:
    """spec 1 §5.6: bounded and non-exhaustive: count is 10 unless told, and the rest waits for other calls."""
    ids = await abandoned(queue, look, 25)
    sizes = [len(await rival.claim_stale(min_idle_ms=OLD // 2, count=3))]
    sizes += [len(await rival.claim_stale(min_idle_ms=OLD // 2)) for _ in range(4)]
    assert sizes == [3, 10, 10, 2, 0]
    assert [row.id for row in await look.pending() if row.consumer == "consumer-2"] == ids


async def test_nothing_stale_is_an_empty_list(queue: Queue, url: str) -> None:
    """spec 1 §5.6: with nothing pending there is nothing to claim, and XCLAIM is not sent."""
    async with recorded(url) as commands:
        assert await queue.claim_stale(min_idle_ms=0) == []
        assert [words[0] for words in await commands.of()] == ["XPENDING"]


async def test_any_consumer_may_claim_its_own_messages_too(queue: Queue, look: Look) -> None:
    """spec 1 §5.7: any consumer may invoke claim_stale, also for what its own name left behind in a crash."""
    [id] = await abandoned(queue, look, 1)
    assert [message.id for message in await queue.claim_stale(min_idle_ms=OLD // 2)] == [id]


async def test_of_two_claimers_only_one_gets_a_message(queue: Queue, rival: Queue, look: Look) -> None:
    """spec 1 §2.3: not delivered concurrently to multiple consumers: a claim resets the idle time for the next."""
    ids = await abandoned(queue, look, 20)
    shares = await asyncio.gather(
        *(some.claim_stale(min_idle_ms=OLD // 2, count=20) for some in (queue, rival, queue, rival))
    )
    claimed = [message.id for share in shares for message in share]
    assert sorted(claimed) == sorted(ids)


async def test_undelivered_messages_are_not_claimed(queue: Queue, rival: Queue) -> None:
    """spec 2 §10.1: stale messages are those that were delivered and not acknowledged, no others."""
    await queue.enqueue({"n": 1})
    assert await rival.claim_stale(min_idle_ms=0) == []


async def test_acknowledged_messages_are_not_claimed(queue: Queue, rival: Queue, look: Look) -> None:
    """spec 2 §10.1: an acknowledged message is never delivered again."""
    await abandoned(queue, look, 1)
    await queue.ack(*await queue.claim_stale(min_idle_ms=0))
    assert await rival.claim_stale(min_idle_ms=0) == []


async def test_a_message_of_a_crashed_consumer_comes_back(queue: Queue, rival: Queue, look: Look) -> None:
    """spec 1 §2.1, §2.3: at-least-once: a consumer that ends before its ack has its message delivered again."""
    sent = await queue.enqueue({"n": 1})
    await queue.read(block_ms=50)
    await queue.aclose()
    await look.age([sent], OLD)
    [message] = await rival.claim_stale(min_idle_ms=OLD // 2)
    assert (message.id, message.payload) == (sent, {"n": 1})


@pytest.mark.parametrize("removal", ["XDEL", "XTRIM"])
async def test_an_entry_that_is_gone_is_neither_returned_nor_left_pending(
    removal: str, queue: Queue, rival: Queue, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    """spec 1 §5.6: claims return real messages; a pending ID without an entry does not haunt the list for ever."""
    ids = await abandoned(queue, look, 4)
    if removal == "XDEL":
        await look.redis.xdel(look.stream, ids[0], ids[2])
        gone = {ids[0], ids[2]}
    else:
        await look.redis.xtrim(look.stream, maxlen=2, approximate=False)
        gone = set(ids[:2])
    left = [id for id in ids if id not in gone]
    with caplog.at_level(logging.ERROR):
        messages = await rival.claim_stale(min_idle_ms=OLD // 2)
    assert sorted(message.id for message in messages) == left
    assert all(message.payload for message in messages)
    assert [(row.id, row.consumer) for row in await look.pending()] == [(id, "consumer-2") for id in left]
    assert not caplog.records
    await rival.ack(*messages)
    assert (await rival.backlog_stats()).pending == 0


async def test_a_page_of_entries_that_are_all_gone_hides_nothing_behind_it(
    queue: Queue, rival: Queue, look: Look
) -> None:
    """spec 1 §5.6: best effort, but not stuck: the next call finds what was behind the deleted ones."""
    ids = await abandoned(queue, look, 12)
    await look.redis.xdel(look.stream, *ids[:10])
    claimed: list[QueueMessage] = []
    for _ in range(2):
        claimed += await rival.claim_stale(min_idle_ms=OLD // 2)
    assert [message.id for message in claimed] == ids[10:]
    assert await look.pending_ids() == ids[10:]


async def test_a_long_pending_list_is_searched_a_part_at_a_time(
    queue: Queue, rival: Queue, look: Look, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """spec 1 §5.6: bounded and non-exhaustive, however long the list is; the next call goes on behind the last."""
    monkeypatch.setattr(stale, "_PAGE", 5)
    monkeypatch.setattr(stale, "_PAGES", 2)
    ids = await abandoned(queue, look, 40)
    await look.age([*ids[:3], *ids[4:39]], 0)
    async with recorded(url) as commands:
        found = [[message.id for message in await rival.claim_stale(min_idle_ms=OLD // 2)] for _ in range(5)]
        asked = [words for words in await commands.of() if words[0] == "XPENDING"]
    assert [*found[0], *(id for some in found[1:] for id in some)] == [ids[3], ids[39]]
    assert found[0] == [ids[3]]
    assert max(len(words) for words in asked) == 6
    assert len(asked) <= 10


async def test_a_deleted_entry_that_is_not_stale_stays_with_its_owner(queue: Queue, rival: Queue, look: Look) -> None:
    """spec 1 §5.6: min_idle_ms holds for deleted entries too: their owner may be at work on them."""
    old, young = await abandoned(queue, look, 2)
    await look.age([young], 0)
    await look.redis.xdel(look.stream, old, young)
    assert await rival.claim_stale(min_idle_ms=OLD // 2) == []
    assert [(row.id, row.consumer) for row in await look.pending()] == [(young, "consumer-1")]


@pytest.mark.parametrize("value", [-1, True, 1.5, "10"], ids=repr)
async def test_an_idle_time_that_is_no_whole_number_is_rejected_before_anything_is_sent(
    value: Any, flavour: Flavour, config: QueueConfig
) -> None:
    """spec 1 §5.6: min_idle_ms is an integer of milliseconds."""
    with pytest.raises(ConfigError, match="min_idle_ms"):
        await flavour.queue("redis://127.0.0.1:1", config).claim_stale(min_idle_ms=value)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "10"], ids=repr)
async def test_a_count_that_is_no_positive_integer_is_rejected_before_anything_is_sent(
    value: Any, flavour: Flavour, config: QueueConfig
) -> None:
    """spec 1 §5.6: the search is bounded by count, so count must be a bound."""
    with pytest.raises(ConfigError, match="count"):
        await flavour.queue("redis://127.0.0.1:1", config).claim_stale(min_idle_ms=0, count=value)
