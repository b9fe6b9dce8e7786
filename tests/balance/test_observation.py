"""What is counted, and what people see in Redis."""

from __future__ import annotations

import asyncio

import pytest

from conquiet.errors import AlreadyClaimedError
from tests.balance.crew import Crew, entry
from tests.rigs.asking import ask, keys_like
from tests.rigs.waiting import eventually

pytestmark = pytest.mark.cluster_too


async def test_a_stream_from_its_beginning_to_its_end_is_counted(crew: Crew) -> None:
    one, other = await crew.join("one"), await crew.join("other")
    for name in ("s1", "s2"):
        await one.balancer.add_stream(name)
        await one.balancer.add_stream(name)
    await eventually(lambda: len(one.owned) == len(other.owned) == 1, "one each")
    assert crew.counted("added_total", consumer="one") == 2
    for member, name in ((one, "one"), (other, "other")):
        assert crew.counted("acquired_total", consumer=name) == 1
        assert crew.counted("recovered_total", consumer=name) == 0
        assert crew.counted("owned", consumer=name) == 1
        [stream] = member.owned
        await member.balancer.done_stream(stream)
        assert crew.counted("ended_total", consumer=name, how="finished") == 1
        assert crew.counted("owned", consumer=name) == 0
    assert crew.counted("ended_total") == 2
    assert crew.counted("claims_total") == 0


async def test_renewals_are_counted(crew: Crew) -> None:
    member = await crew.join()
    for name in ("s1", "s2"):
        await member.balancer.add_stream(name)
    await member.owns("s1", "s2")
    before = crew.counted("renewed_total")
    await crew.lag_behind(12)
    await eventually(lambda: crew.counted("renewed_total") >= before + 4, "renewals of both")


async def test_claims_releases_losses_and_recoveries_are_counted(crew: Crew) -> None:
    first = await crew.join("first")
    for name in ("s1", "s2", "s3"):
        await first.balancer.add_stream(name)
    await first.owns("s1", "s2", "s3")
    second = await crew.join("second")
    await second.has_looked()
    with pytest.raises(AlreadyClaimedError):
        await second.balancer.claim("s1")
    await first.balancer.release_stream("s1")
    await second.balancer.claim("s1")
    assert crew.counted("claims_total", consumer="second", result="refused") == 1
    assert crew.counted("claims_total", consumer="second", result="claimed") == 1
    assert crew.counted("ended_total", consumer="first", how="released") == 1
    await crew.ask("ZADD", crew.keys.leases, 1, "s2")
    third = await crew.join("third")
    await third.owns("s2")
    crew.clock.advance(5)
    await eventually(lambda: crew.counted("ended_total", consumer="first", how="lost") == 1, "the loss")
    assert crew.counted("recovered_total", consumer="third") == 1
    assert crew.counted("sweep_lag_seconds_count") >= 1
    await first.balancer.aclose()
    assert crew.counted("ended_total", consumer="first", how="released") == 2
    assert crew.counted("owned", consumer="first") == 0


async def test_the_metrics_name_the_configured_consumer_only(crew: Crew) -> None:
    member = await crew.join("pod-7")
    await member.balancer.add_stream("s")
    await member.owns("s")
    assert crew.counted("owned", consumer="pod-7") == 1
    assert crew.counted("owned", consumer=member.balancer.consumer) == 0


async def test_people_see_who_owns_a_stream_and_nothing_depends_on_it(crew: Crew) -> None:
    member = await crew.join("pod-7")
    await member.balancer.add_stream("s")
    await member.owns("s")
    mutex = f"mutex:{{{crew.service}-input}}:s"
    assert await crew.ask("GET", mutex) == member.balancer.consumer
    assert 0 < await crew.ask("PTTL", mutex) <= 15_000
    await crew.ask("DEL", mutex)
    rival = await crew.join("rival", auto_claim=True)
    with pytest.raises(AlreadyClaimedError):
        await rival.balancer.claim("s")
    await crew.lag_behind(8)
    assert await crew.ask("GET", mutex) == member.balancer.consumer
    assert (member.lost, rival.owned) == ([], set())


async def test_the_names_of_the_specification_are_used(crew: Crew) -> None:
    member = await crew.join()
    await member.balancer.add_stream("s", {"a": 1})
    await member.owns("s")
    [(_, fields)] = await crew.ask("XRANGE", f"{crew.service}-input", "-", "+")
    assert fields == {"lbs-input": '{"DataStreamName":"s","Info":{"a":1}}'}
    [group] = await crew.ask("XINFO", "GROUPS", f"{crew.service}-input")
    assert f"{crew.service}-group" in str(group)


async def test_all_keys_of_a_service_carry_its_tag(crew: Crew, url: str) -> None:
    member = await crew.join()
    await crew.put("lbs-input", "bad")
    for name in ("s1", "{s2}"):
        await member.balancer.add_stream(name)
    await member.owns("s1", "{s2}")
    await member.balancer.owned["s1"].commit("1-1")
    await member.balancer.release_stream("s1")
    found = await keys_like(url, f"*{crew.service}*")
    tag = f"{{{crew.service}-input}}"
    assert [key for key in found if key != f"{crew.service}-input" and key.split(":")[1] != tag] == []
    assert {key.split(":")[0] for key in found} >= {"owner", "lease", "epoch", "pos", "bad", "mutex"}


# --- users who may do little --------------------------------------------------------------------------------------


@pytest.mark.one_node
@pytest.mark.parametrize("forbidden", ["-config", "-config -client"])
async def test_a_user_without_config_on_the_keys_of_the_service_alone(crew: Crew, url: str, forbidden: str) -> None:
    user, tag = f"u{crew.service}", f"{{{crew.service}-input}}"
    rules = (f"~{crew.service}-input", f"~*:{tag}*", "~data", "+@all", "-@admin", *forbidden.split())
    await ask(url, "ACL", "SETUSER", user, "reset", "on", ">secret", *rules)
    mine = url.replace("//", f"//{user}:secret@")
    member = await crew.join("m", url=mine, auto_claim=True)
    await crew.put("lbs-input", "bad")
    await crew.put("lbs-input", entry("data"))
    await member.owns("data")
    lease = member.balancer.owned["data"]
    assert await lease.read(block_ms=10) == []
    await lease.commit("1-1")
    await crew.lag_behind(8)
    await member.balancer.release_stream("data")
    await member.owns("data")
    await member.balancer.done_stream("data")
    async with asyncio.timeout(15):
        await member.balancer.aclose()
    await ask(url, "ACL", "DELUSER", user)
