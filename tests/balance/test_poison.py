"""Entries of the input that are no streams, or not only that: set aside with a reason, and never in the way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conquiet import PayloadError
from conquiet.balance import StreamAdded
from tests.balance.crew import Crew, entry
from tests.rigs.waiting import eventually

pytestmark = pytest.mark.cluster_too

FIELD = "lbs-input"
DEEP = "[" * 100_000 + "]" * 100_000
BAD: dict[str, tuple[str, ...]] = {
    "not JSON": (FIELD, "no json"),
    "empty": (FIELD, ""),
    "half of it": (FIELD, '{"DataStreamName": "s"'),
    "no field": ("other", entry("s")),
    "a string": (FIELD, '"s"'),
    "a number": (FIELD, "7"),
    "null": (FIELD, "null"),
    "an array": (FIELD, '["DataStreamName"]'),
    "no name": (FIELD, '{"Info": {}}'),
    "name null": (FIELD, entry(None)),
    "name a number": (FIELD, entry(7)),
    "name an object": (FIELD, entry({"a": 1})),
    "name empty": (FIELD, entry("")),
    "name huge": (FIELD, entry("x" * 5000)),
    "name of many bytes": (FIELD, entry("ü" * 600)),
    "info a string": (FIELD, entry("s", "text")),
    "info a number": (FIELD, entry("s", 1)),
    "deep": (FIELD, DEEP),
    "deep info": (FIELD, f'{{"DataStreamName": "s", "Info": {{"a": {DEEP}}}}}'),
    "deeper than is decoded": (FIELD, f'{{"DataStreamName": "s", "Info": {{"a": {"[" * 300 + "]" * 300}}}}}'),
    "half a surrogate pair": (FIELD, '{"DataStreamName": "\\ud800", "Info": {}}'),
}


@pytest.mark.parametrize("what", BAD)
async def test_it_is_set_aside_with_a_reason_and_what_is_behind_it_is_delivered(crew: Crew, what: str) -> None:
    member = await crew.join()
    id = await crew.put(*BAD[what])
    await member.balancer.add_stream("good")
    await member.owns("good")
    [fields] = await crew.aside()
    assert fields["id"].decode() == id
    assert fields["reason"]
    assert BAD[what][1].encode() in fields["entry"]
    assert (await crew.size(), len(await crew.pending())) == (1, 1)
    await eventually(lambda: crew.counted("set_aside_total") == 1, "it to be counted")


async def test_many_at_once_are_all_set_aside(crew: Crew) -> None:
    for fields in BAD.values():
        await crew.put(*fields)
    await crew.put(FIELD, entry("good", {"a": 1}))
    one, other = await crew.join("one"), await crew.join("other")
    await eventually(lambda: one.added + other.added == ["good"], "the good one")
    assert await crew.ask("XLEN", crew.keys.bad) == len(BAD)
    assert await crew.size() == 1


@pytest.mark.slow
async def test_an_entry_of_megabytes_is_not_decoded_and_its_beginning_is_set_aside(crew: Crew) -> None:
    member = await crew.join()
    await crew.put(FIELD, entry("large", {"a": "x" * 3_000_000}))
    await member.balancer.add_stream("good")
    await member.owns("good")
    [fields] = await crew.aside()
    assert b"longer than 1 MB" in fields["reason"]
    assert b"large" in fields["entry"]
    assert len(fields["entry"]) < 100_000


async def test_brackets_in_texts_are_not_nested(crew: Crew) -> None:
    member = await crew.join()
    info = {"a": '[{"\\"' * 1000, "b": [[1]] * 400}
    await member.balancer.add_stream("s", info)
    await member.owns("s")
    [event] = member.events
    assert isinstance(event, StreamAdded)
    assert event.info == info


async def test_info_of_more_than_a_megabyte_is_refused_before_it_is_sent(crew: Crew) -> None:
    member = await crew.join()
    with pytest.raises(PayloadError, match="may have 1048576"):
        await member.balancer.add_stream("s", {"a": "x" * 1_048_576})


NOT_UTF8 = b'{"DataStreamName": "s\xff\xfe", "Info": {}}'


async def test_a_name_that_is_not_utf8_does_not_end_the_reader(crew: Crew) -> None:
    member = await crew.join()
    await crew.ask("XADD", crew.keys.input, "*", FIELD, NOT_UTF8)  # type: ignore[arg-type]
    await member.balancer.add_stream("good")
    await eventually(lambda: "good" in member.owned, "what is behind it")


async def test_info_that_is_not_utf8_does_not_end_the_reader(crew: Crew) -> None:
    member = await crew.join()
    await crew.ask("XADD", crew.keys.input, "*", FIELD, b'{"DataStreamName": "s", "Info": {"a": "\xff"}}')  # type: ignore[arg-type]
    await member.balancer.add_stream("good")
    await eventually(lambda: "good" in member.owned, "what is behind it")


@pytest.mark.parametrize("info", ["null", "[]", "[1, 2]", '{"n": 1e400}', '{"a": 1, "a": 2}'])
async def test_what_is_odd_but_names_a_stream_is_a_stream(crew: Crew, info: str) -> None:
    member = await crew.join()
    await crew.put(FIELD, f'{{"DataStreamName": "s", "Info": {info}, "more": true}}')
    await crew.put(FIELD, '{"DataStreamName": "bare"}')
    await eventually(lambda: "bare" in member.owned, "what is behind it")
    bad = await crew.ask("XLEN", crew.keys.bad)
    assert ("s" in member.owned, bad) in ((True, 0), (False, 1))


async def test_more_fields_do_not_matter_neither_at_first_nor_after_a_takeover(crew: Crew) -> None:
    await crew.put("trace", "abc", FIELD, entry("s", {"a": 1}), "more", "x")
    member = await crew.join()
    await member.owns("s")
    assert member.balancer.owned["s"].info == {"a": 1}
    await crew.die(member)
    heir = await crew.join("heir")
    await heir.owns("s")
    assert heir.balancer.owned["s"].info == {"a": 1}
    await crew.die(heir)
    claimer = await crew.join("claimer", max_streams=1, sweep_interval=600.0)
    await eventually(lambda: bool(claimer.owned), "the third owner")
    await claimer.balancer.release_stream("s")
    assert (await claimer.balancer.claim("s")).info == {"a": 1}


async def test_info_comes_back_as_it_was_given(crew: Crew) -> None:
    info: dict[str, Any] = {"deep": {"list": [None, True, 1.5, 2**60, "Zoë\x00"]}, "": {}, "empty": []}
    member = await crew.join()
    await member.balancer.add_stream("s", info)
    await member.owns("s")
    assert member.told(StreamAdded)[0].info == info
    await crew.die(member)
    heir = await crew.join("heir")
    await heir.owns("s")
    assert heir.balancer.owned["s"].info == info


async def test_the_deepest_info_that_can_be_added_can_be_taken(crew: Crew) -> None:
    deep: Any = 1
    for _ in range(250):
        deep = [deep]
    member = await crew.join()
    await member.balancer.add_stream("s", {"deep": deep})
    await member.owns("s")
    assert member.balancer.owned["s"].info == {"deep": deep}


# --- what another group member has left behind --------------------------------------------------------------------


async def leave_pending(crew: Crew, count: int) -> None:
    """Another program took entries in the same group, and died long ago; nothing else is known of them."""
    keys = crew.keys
    await crew.ask("XGROUP", "CREATE", keys.input, keys.group, "0", "MKSTREAM")
    rows = await crew.ask("XREADGROUP", "GROUP", keys.group, "foreign", "COUNT", count, "STREAMS", keys.input, ">")
    ids = [id for id, _ in rows[0][1]]
    await crew.ask("XCLAIM", keys.input, keys.group, "foreign", 0, *ids, "IDLE", 3_600_000, "JUSTID", parse_justid=True)


async def test_an_idle_malformed_entry_does_not_hold_up_the_good_ones_behind_it(crew: Crew) -> None:
    await crew.put(FIELD, "no json")
    await crew.put(FIELD, entry("s1", {"n": 1}))
    await crew.put("wrong", "field")
    await crew.put(FIELD, entry("s2", {"n": 2}))
    await leave_pending(crew, 4)
    member = await crew.join(auto_claim=True)
    await member.balancer.add_stream("new")
    await eventually(lambda: "new" in member.owned, "the new one")
    await member.owns("s1", "s2", "new")
    assert await crew.ask("XLEN", crew.keys.bad) == 2


async def test_what_was_set_aside_can_be_read(crew: Crew) -> None:
    member = await crew.join()
    await crew.put("a", "1", "b", json.dumps({"x": 1}))
    await member.balancer.add_stream("good")
    await member.owns("good")
    [fields] = await crew.aside()
    assert FIELD in fields["reason"].decode()
    for part in (b"a", b"1", b"b", b'{"x": 1}'):
        assert part in fields["entry"]
