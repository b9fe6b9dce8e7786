"""Reading many streams at the same time: one blocked ``XREAD`` a node for all callers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from redis.crc import key_slot
from redis.exceptions import RedisError

from conquiet.errors import ConfigError
from conquiet.kit.loopthread import forks, leave_behind
from conquiet.kit.service import Background
from conquiet.wire.address import Endpoint
from conquiet.wire.interrupt import Interrupt
from conquiet.wire.parser import Reply
from conquiet.wire.read_group import ReadGroup
from conquiet.wire.shared_connection import running_loop
from conquiet.wire.turns import Turns

if TYPE_CHECKING:
    from conquiet.wire.connections import Connections

__all__ = ["SharedRead"]

_AT_A_TIME: Final = 8


class SharedRead:
    """Many callers wait for entries of different streams, over one connection a node, however many they are.

    A Cluster lets a command block on the streams of one slot only: there, at most 8 commands block at a node at the
    same time. With more slots than that they take turns of 0.4 seconds.

    No caller gets an entry of another's stream, or one twice: each says behind which entry it begins. A caller that
    leaves costs no command. One that comes costs none either if its stream is listened to already; else the running
    read is interrupted and begun anew, at most 20 times a second for all newcomers.
    """

    def __init__(self, link: Connections) -> None:
        self._link = link
        self._here: _Groups | None = None

    async def read(
        self, after: Mapping[str, str], count: int, seconds: float, interrupt: Interrupt | None = None
    ) -> Reply | None:
        """As ``XREAD COUNT BLOCK`` of the streams ``after``, each from behind its ID; ``None`` if nothing came.

        Waits up to ``seconds``, or until the interrupt is requested. The streams lie in one slot, and their IDs are
        IDs of entries, never ``$``. Raises what a read of these streams alone would raise.
        """
        groups = self._here
        if groups is None or groups.loop is not running_loop() or groups.forks != forks():
            groups = self._here = _Groups(self._link, groups)
        stream = next(iter(after))
        try:
            return await groups.of(stream).read(after, count, seconds, interrupt or Interrupt())
        except (RedisError, OSError) as error:
            self._link.refuse(stream, error)

    async def aclose(self) -> None:
        """Read no more; callers that wait get an error."""
        groups, self._here = self._here, None
        if groups is not None and groups.forks != forks():
            leave_behind(groups)
        elif groups is not None:
            await groups.background.aclose()


class _Groups:
    """What is being read on one event loop of one process."""

    def __init__(self, link: Connections, before: _Groups | None) -> None:
        self.loop = running_loop()
        self.forks = forks()
        self.link = link
        self.background = Background()
        self._groups: dict[int, list[ReadGroup]] = {}
        self._turns: dict[Endpoint, Turns] = {}
        if before is not None and before.forks != self.forks:
            leave_behind(before)
        elif before is not None and before.is_in_use and not before.loop.is_closed():
            raise ConfigError("opened on another event loop, which is still there: make one object for each loop")

    @property
    def is_in_use(self) -> bool:
        """Whether a read is under way."""
        return any(group.is_running for groups in self._groups.values() for group in groups)

    def of(self, stream: str) -> ReadGroup:
        """The group that ``stream`` is read in."""
        slot = key_slot(stream.encode()) if self.link.address.kind == "cluster" else 0
        groups = self._groups.setdefault(slot, [])
        if len(groups) == 1 and groups[0].has_room:
            return groups[0]
        fitting = [one for one in groups if one.knows(stream)] or [one for one in groups if one.has_room]
        if not fitting:
            fitting = [ReadGroup(self.link, self.background, self.turns)]
            groups += fitting
        return fitting[0]

    async def turns(self, stream: str) -> Turns:
        """The turns of the node that has ``stream`` now."""
        endpoint = await self.link.home(stream)
        found = self._turns.get(endpoint)
        if found is None:
            found = self._turns[endpoint] = Turns(_AT_A_TIME)
        return found
