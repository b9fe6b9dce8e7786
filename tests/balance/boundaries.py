"""What a consumer sends, call by call and in its life: each with every command, what is there before and after."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Final

from conquiet import QueueError
from conquiet.balance import StreamLease
from tests.balance.crew import Crew, Member
from tests.rigs.calling import Path
from tests.rigs.tracing import Tracer
from tests.rigs.waiting import eventually

__all__ = ["AFTER_A_LOSS", "BEAT", "CALLS", "FAR", "LIFE", "LOOPS", "Scene"]

FAR: Final = 600.0
"""Seconds of a lease that nobody waits for."""
BEAT: Final = FAR / 3

LOOPS: Final = (
    *("balance_recover", "balance_sweep", "balance_take", "XREAD", "balance_renew"),
    *("balance_sweep: given", "balance_take: given"),
)
"""What an open consumer sends without being asked, whenever it comes."""
AFTER_A_LOSS: Final = ("XPENDING", "balance_regrant", "balance_release")
"""What it sends after an answer was lost; it releases what somebody was told not to have."""
LIFE: Final = ("CLIENT", "XGROUP", *LOOPS, "balance_finish", "balance_release")
"""Everything that a consumer sends from beginning to end, if nothing fails."""


@dataclass
class Scene:
    """A consumer that is reached through a proxy, and owns ``mine``; ``free`` is nobody's."""

    proxy: Tracer
    crew: Crew
    member: Member | None = None
    opened: int = 0

    @property
    def balancer(self) -> Any:
        assert self.member is not None
        return self.member.balancer

    @property
    def lease(self) -> StreamLease:
        found: StreamLease = self.balancer.owned["mine"]
        return found

    async def entries(self) -> int:
        return len(await self.crew.ask("XRANGE", self.crew.keys.input, "-", "+"))

    async def owner(self, stream: str) -> str:
        """Whom the server has for the owner."""
        record = await self.crew.ask("HGET", self.crew.keys.owners, stream)
        return str(record).rsplit("|", 1)[-1] if record else "nobody: it is finished"


# --- before and during ------------------------------------------------------------------------------------------------


async def joined(scene: Scene) -> None:
    """It has no room for more than the one stream that it has."""
    url = scene.proxy.url
    scene.member = await scene.crew.join("member", url=url, lease_ttl=FAR, max_streams=1, sweep_interval=FAR)
    await scene.member.has_looked()
    await scene.crew.add("mine")
    await scene.member.owns("mine")
    await scene.crew.add("free")


async def with_entries(scene: Scene) -> None:
    await joined(scene)
    await scene.crew.ask("DEL", "mine")
    for n in range(3):
        await scene.crew.ask("XADD", "mine", f"{n + 1}-1", "n", n)


async def open_another(scene: Scene) -> None:
    """Whoever could not open a balancer makes another."""
    scene.opened += 1
    balancer = scene.crew.make(f"member-{scene.opened}", url=scene.proxy.url, lease_ttl=FAR)
    await balancer.open()
    scene.member = Member(balancer)
    scene.crew.members.append(scene.member)


async def claim(scene: Scene) -> StreamLease:
    lease: StreamLease = await scene.balancer.claim("free")
    return lease


def add(scene: Scene) -> Awaitable[str]:
    producer: Awaitable[str] = scene.balancer.add_stream("new", {"a": 1})
    return producer


# --- after ------------------------------------------------------------------------------------------------------------


async def it_works(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    await scene.crew.add("s")
    assert scene.member is not None
    await scene.member.owns("s")


async def is_there_once(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert await scene.entries() == 3
    assert second == (await scene.crew.ask("XRANGE", scene.crew.keys.input, "-", "+"))[-1][0]


async def both_are_mine(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert second.owned
    await second.commit("7-1")
    assert scene.balancer.owned.keys() == {"mine", "free"}
    assert {await scene.owner(name) for name in ("mine", "free")} == {scene.balancer.consumer}
    await scene.balancer.done_stream("free")


async def mine_is_finished(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    """So there is room for the other one, at once."""
    assert scene.member is not None
    await scene.member.owns("free")
    assert await scene.entries() == 1
    assert scene.member.lost == []


async def mine_is_given_back(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    """Somebody else has it, and the one that was free, without waiting for a lease."""
    other = await scene.crew.join("other", lease_ttl=FAR, auto_claim=True)
    await eventually(lambda: "mine" in other.owned, "another to have it")
    assert scene.member is not None
    assert scene.member.lost == []


async def mine_is_read_up_to_there(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert await scene.crew.positions() == {"mine": "5-1"}


async def all_is_read(scene: Scene, *, done: bool, at: int, first: QueueError, second: Any) -> None:
    assert [message.id for message in second] == ["1-1", "2-1", "3-1"]


# --- the paths --------------------------------------------------------------------------------------------------------

CALLS: Final[dict[str, Path[Scene]]] = {
    "open": Path(("XGROUP", "balance_renew"), open_another, it_works),
    "add": Path(("balance_add",), add, is_there_once, joined),
    "claim": Path(("balance_claim",), claim, both_are_mine, joined),
    "done": Path(("balance_finish",), lambda s: s.balancer.done_stream("mine"), mine_is_finished, joined),
    "release": Path(("balance_release",), lambda s: s.balancer.release_stream("mine"), mine_is_given_back, joined),
    "commit": Path(("balance_position",), lambda s: s.lease.commit("5-1"), mine_is_read_up_to_there, joined),
    "read": Path(("HGET",), lambda s: s.lease.read(), all_is_read, with_entries),
}
"""The commands of each call, in order. What the loops send comes beside them."""
