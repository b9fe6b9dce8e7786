"""Answers that are lost, at every script and command: what is mine is known to be mine within one heartbeat.

Every lease is so long that none of them ends here; time goes on by one heartbeat at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import pytest

from conquiet import QueueError
from conquiet.balance import StreamLease
from tests.balance.boundaries import AFTER_A_LOSS, BEAT, CALLS, FAR, LIFE, LOOPS, Scene
from tests.balance.crew import Crew, Handler, Member
from tests.rigs.calling import at_each, boundaries, sends_what_is_listed, struck_and_made_again
from tests.rigs.cluster_tracing import tracing
from tests.rigs.tracing import SCRIPTS, Tracer, Way
from tests.rigs.waiting import LONG, eventually

pytestmark = [pytest.mark.any_server, pytest.mark.guarantee]

SHORT: Final = 15.0
"""Seconds of a lease where time goes on until consumers have shared."""
WAYS: Final[tuple[Way, ...]] = ("unanswered", "unsent")
both_ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
async def tracer(url: str) -> AsyncIterator[Tracer]:
    async with tracing(url) as proxy:
        yield proxy


@pytest.fixture
def scene(tracer: Tracer, crew: Crew) -> Scene:
    return Scene(tracer, crew)


async def within_a_heartbeat(crew: Crew, member: Member, *streams: str) -> None:
    """Return once it owns exactly these, and has lost none; fails if that takes longer."""
    began = crew.clock.monotonic()

    def owns() -> bool:
        crew.clock.advance(min(BEAT / 50, max(0.0, began + BEAT - crew.clock.monotonic())))
        return member.owned == set(streams)

    await eventually(owns, f"it to own {streams}")
    assert member.lost == []
    assert all(lease.owned for lease in member.balancer.owned.values())


async def happened(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), LONG)


# --- the lists --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CALLS)
async def test_a_call_sends_what_is_listed_and_nothing_else(scene: Scene, path: str) -> None:
    """A new command belongs on the list of its call, and so is struck at like the others."""
    background = {"CLIENT", "HELLO", *LOOPS} - set(CALLS[path].commands)
    await sends_what_is_listed(scene, CALLS[path], background)


async def test_a_life_has_what_is_listed_and_nothing_else(scene: Scene) -> None:
    crew, proxy = scene.crew, scene.proxy
    other = await crew.join("other", lease_ttl=FAR)
    await crew.add("left")
    await other.owns("left")
    await other.balancer.aclose()
    member = await crew.join("member", url=proxy.url, lease_ttl=FAR, sweep_interval=BEAT)
    await crew.add("s1", "s2")
    await member.owns("left", "s1", "s2")
    renewals = proxy.trace.count("balance_renew")
    crew.clock.advance(BEAT)
    await eventually(lambda: proxy.trace.count("balance_renew") > renewals, "a renewal")
    await eventually(lambda: "XREAD" in proxy.trace, "a wait that was answered")
    await member.balancer.done_stream("s1")
    await member.balancer.aclose()
    assert set(proxy.trace) == set(LIFE)


async def test_after_a_loss_it_sends_what_is_listed_and_nothing_else(scene: Scene) -> None:
    await (CALLS["claim"].prepare)(scene)
    struck = scene.proxy.strike("balance_claim", (), "unanswered")
    with pytest.raises(QueueError):
        await scene.balancer.claim("free")
    assert struck.is_set()
    looks = scene.balancer._consumer.strays
    await eventually(lambda: looks.looks == 1, "the first look")
    assert set(scene.proxy.trace) <= {"balance_claim", *LIFE, *AFTER_A_LOSS}
    following = iter(scene.proxy.trace)
    assert [name for name in ("balance_claim", *AFTER_A_LOSS) if name not in following] == []


def test_every_script_of_the_room_is_on_a_path() -> None:
    listed = {*LIFE, *AFTER_A_LOSS, *(name for path in CALLS.values() for name in path.commands)}
    assert {script.name for script in SCRIPTS.values() if script.name.startswith("balance_")} <= listed


# --- one call ---------------------------------------------------------------------------------------------------------


@at_each(CALLS, boundaries(CALLS))
@both_ways
async def test_a_call_whose_answer_is_lost_can_be_made_again(scene: Scene, path: str, at: int, way: Way) -> None:
    await struck_and_made_again(scene, CALLS[path], at, way)


async def test_a_read_whose_answer_is_lost_can_be_made_again(scene: Scene) -> None:
    await (CALLS["read"].prepare)(scene)
    lease = scene.lease
    assert [message.id for message in await lease.read(count=1)] == ["1-1"]
    cut = scene.proxy.cut(b"\r\nmine\r\n")
    with pytest.raises(QueueError):
        await lease.read()
    assert cut.is_set()
    assert [message.id for message in await lease.read()] == ["2-1", "3-1"]


# --- what a consumer does by itself -----------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("target", LOOPS)
async def test_a_consumer_that_loses_an_answer_owns_what_is_its_own_within_a_heartbeat(
    scene: Scene, target: str, way: Way
) -> None:
    """New streams, one that another gives back, and one that nobody has since long."""
    crew = scene.crew
    other = await crew.join("other", lease_ttl=FAR, max_streams=2)
    await crew.add("left", "given")
    await other.owns("left", "given")
    await other.balancer.release_stream("left")
    await eventually(lambda: "left" not in other.owned, "nobody to have it")
    member = await crew.join("member", url=scene.proxy.url, lease_ttl=FAR, auto_claim=True, sweep_interval=BEAT / 4)
    await member.has_looked()
    struck = scene.proxy.strike(target, (), way)
    await other.balancer.release_stream("given")
    await other.balancer.aclose()
    await crew.add("s1", "s2")
    began = crew.clock.monotonic()

    def is_struck() -> bool:
        crew.clock.advance(min(BEAT / 50, max(0.0, began + BEAT - crew.clock.monotonic())))
        return struck.is_set()

    await eventually(is_struck, f"{target} to come within a heartbeat")
    await within_a_heartbeat(crew, member, "left", "given", "s1", "s2")
    for stream in ("left", "given", "s1", "s2"):
        assert await scene.owner(stream) == member.balancer.consumer
        await member.balancer.done_stream(stream)
    assert await crew.size() == 0


@both_ways
@pytest.mark.parametrize("target", AFTER_A_LOSS[:2])
async def test_a_look_for_what_was_lost_may_lose_its_answer_too(scene: Scene, target: str, way: Way) -> None:
    crew = scene.crew
    member = await crew.join("member", url=scene.proxy.url, lease_ttl=FAR, sweep_interval=BEAT / 4)
    await member.has_looked()
    scene.proxy.strike("balance_take: given", (), "unanswered")
    lost_too = scene.proxy.strike_again(target, way)
    await crew.add("s1", "s2")
    await happened(lost_too)
    await within_a_heartbeat(crew, member, "s1", "s2")
    await member.balancer.done_stream("s1")
    await member.balancer.release_stream("s2")


@both_ways
@pytest.mark.parametrize("target", AFTER_A_LOSS)
async def test_a_stream_whose_claim_failed_is_anothers_within_a_heartbeat(scene: Scene, target: str, way: Way) -> None:
    """The claim was done and not answered, and so was what was to give the stream back."""
    crew = scene.crew
    await (CALLS["claim"].prepare)(scene)
    scene.proxy.strike("balance_claim", (), "unanswered")
    struck = scene.proxy.strike_again(target, way)
    with pytest.raises(QueueError):
        await scene.balancer.claim("free")
    other = await crew.join("other", lease_ttl=FAR, auto_claim=True, sweep_interval=BEAT / 4)
    await happened(struck)
    began = crew.clock.monotonic()

    def moves_on() -> bool:
        crew.clock.advance(min(BEAT / 50, max(0.0, began + BEAT - crew.clock.monotonic())))
        return other.owned == {"free"}

    await eventually(moves_on, "another to own it")
    assert scene.balancer.owned.keys() == {"mine"}


@both_ways
async def test_a_renewal_that_is_lost_is_made_again_in_time(scene: Scene, way: Way) -> None:
    crew = scene.crew
    member = await crew.join("member", url=scene.proxy.url, lease_ttl=FAR)
    await crew.add("s")
    await member.owns("s")
    before = float(await crew.ask("ZSCORE", crew.keys.leases, "s"))
    struck = scene.proxy.strike("balance_renew", (), way)
    crew.clock.advance(BEAT)
    await happened(struck)
    renewed = before + 1000 * BEAT

    began = crew.clock.monotonic()

    async def is_renewed() -> bool:
        crew.clock.advance(min(BEAT / 100, max(0.0, began + BEAT - crew.clock.monotonic())))
        return float(await crew.ask("ZSCORE", crew.keys.leases, "s")) > renewed

    await eventually(is_renewed, "it to be renewed a second time")
    assert (member.owned, member.lost) == ({"s"}, [])


# --- what a consumer that runs handlers does --------------------------------------------------------------------------


@both_ways
async def test_a_handler_that_returned_has_finished_its_stream_once(scene: Scene, way: Way) -> None:
    async def returns(stream: str, lease: StreamLease) -> None:
        pass

    crew, handler = scene.crew, Handler(returns)
    await crew.running("member", handler, url=scene.proxy.url, lease_ttl=FAR)
    struck = scene.proxy.strike("balance_finish", (), way)
    await crew.add("s")
    await happened(struck)
    began = crew.clock.monotonic()

    def is_counted() -> bool:
        crew.clock.advance(min(BEAT / 1000, max(0.0, began + BEAT - crew.clock.monotonic())))
        return crew.counted("ended_total", consumer="member") == 1

    await eventually(is_counted, "it to end within a heartbeat")
    assert crew.counted("ended_total", consumer="member", how="finished") == 1
    assert (handler.streams, await crew.size()) == (["s"], 0)


@both_ways
async def test_what_is_given_to_another_is_his_within_a_heartbeat(scene: Scene, way: Way) -> None:
    crew, first, second = scene.crew, Handler(), Handler()
    await crew.running("member", first, url=scene.proxy.url, lease_ttl=SHORT)
    await crew.add("s1", "s2")
    await eventually(lambda: len(first.calls) == 2, "both to run")
    struck = scene.proxy.strike("balance_release", (), way)
    await crew.running("other", second, lease_ttl=SHORT)
    for _ in range(8):
        if not struck.is_set():
            await crew.lag_behind(4)
    await happened(struck)
    began = crew.clock.monotonic()

    def is_his() -> bool:
        crew.clock.advance(min(0.1, max(0.0, began + SHORT / 3 - crew.clock.monotonic())))
        return len(second.calls) == 1

    await eventually(is_his, "the other to have it")
    assert len(first.calls) == 2, "what was given away was not begun anew"


@both_ways
async def test_who_leaves_and_loses_the_answer_has_left(scene: Scene, way: Way) -> None:
    """What did not arrive runs out; what was only not answered is another's at once."""
    crew = scene.crew
    member = await crew.join("member", url=scene.proxy.url, lease_ttl=FAR)
    await crew.add("s1", "s2")
    await member.owns("s1", "s2")
    struck = scene.proxy.strike("balance_release", (), way)
    await member.balancer.aclose()
    assert struck.is_set()
    other = await crew.join("other", lease_ttl=FAR)
    if way == "unsent":
        crew.clock.advance(FAR + 1)
    await other.owns("s1", "s2")
