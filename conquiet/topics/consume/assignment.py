"""Who should own which partition: fair, sticky and the same wherever it is computed.

Every member of a group computes this by itself from what it sees in Redis, so equal input must give equal output.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from conquiet.errors import ConfigError
from conquiet.kit import rules

__all__ = ["Seat", "assign"]

_Origins: TypeAlias = "dict[str, tuple[str, int] | None]"


@dataclass(frozen=True, slots=True)
class Seat:
    """A live member of a group, and what it is willing to own."""

    member: str
    most: int | None = None
    """The most partitions it owns at a time; ``None`` for any number."""
    modulo: int | None = None
    """With ``remainder``: it owns only partitions of that remainder, taken by this modulo itself."""
    remainder: int | None = None

    def __post_init__(self) -> None:
        rules.text("member", self.member)
        if self.most is not None:
            rules.integer("most", self.most, least=0)
        if (self.modulo is None) is not (self.remainder is None):
            raise ConfigError(
                f"modulo and remainder must be given together, not modulo={self.modulo!r}, remainder={self.remainder!r}"
            )
        if self.modulo is not None:
            rules.integer("modulo", self.modulo, least=1)
            rules.integer("remainder", self.remainder, least=0)

    def takes(self, partition: int) -> bool:
        """Whether it may own ``partition``."""
        pin = self.pin
        return pin is None or partition % pin[0] == pin[1]

    @property
    def pin(self) -> tuple[int, int] | None:
        """The modulo and a remainder below it; ``None`` if it may own any partition."""
        if self.modulo is None or self.remainder is None:
            return None
        return self.modulo, self.remainder % self.modulo


def assign(partitions: Sequence[int], seats: Sequence[Seat], owners: Mapping[int, str]) -> dict[int, str]:
    """The member for each partition, given who owns it now; without those that nobody can take.

    * As many partitions as possible have an owner, within what the seats are willing to own.
    * Loads are as equal as that allows: between members that take anything, they differ by one at most.
    * A partition stays with its owner unless one of the above needs it elsewhere; where every member takes
      anything, no assignment that is as fair moves fewer.
    * The order of the arguments does not matter, and the outcome for owners who already own what they should is
      what they own.
    """
    table = _Table(_in_order(seats))
    waiting = [partition for partition in _numbers(partitions) if not table.keep(partition, owners.get(partition))]
    for partition in waiting:
        table.place(partition)
    table.level()
    return dict(sorted(table.placements()))


def _in_order(seats: Iterable[Seat]) -> dict[str, Seat]:
    found: dict[str, Seat] = {}
    for seat in sorted(seats, key=lambda seat: seat.member):
        if seat.member in found:
            raise ConfigError(f"seats must be of different members, not twice of {seat.member!r}")
        found[seat.member] = seat
    return found


def _numbers(partitions: Iterable[int]) -> list[int]:
    return sorted({rules.integer("partition", partition, least=0) for partition in partitions})


class _Table:
    """The members with what they hold, while partitions are dealt out.

    Partitions that the same members may take are of one kind. A member that is full may still take a partition
    if it can pass another one on, and so forth: such a chain is searched breadth first, a kind at a time, which
    is fast since there are few kinds (one, if no member is pinned).
    """

    def __init__(self, seats: Mapping[str, Seat]) -> None:
        self._seats = seats
        self._names = {member: member.encode() for member in seats}
        self._room = {member: math.inf if seat.most is None else seat.most for member, seat in seats.items()}
        self._load = dict.fromkeys(seats, 0)
        # A stack for each kind: what was kept lies at the bottom, so what came last is passed on first.
        self._held: dict[str, dict[int, list[int]]] = {member: {} for member in seats}
        self._pins = {seat.pin: seat for seat in seats.values()}
        self._kinds: dict[tuple[tuple[int, int] | None, ...], int] = {}
        self._takers: list[list[str]] = []
        self._closed: set[str] = set()

    def keep(self, partition: int, owner: str | None) -> bool:
        """Leave ``partition`` to its ``owner``, if that one may own it and has room."""
        seat = None if owner is None else self._seats.get(owner)
        if seat is None or not seat.takes(partition) or self._load[seat.member] >= self._room[seat.member]:
            return False
        self._give(partition, self._kind(partition), seat.member)
        self._load[seat.member] += 1
        return True

    def place(self, partition: int) -> None:
        """Give ``partition`` to the least loaded who may take it, if need be by passing others on."""
        kind = self._kind(partition)
        origins: _Origins = dict.fromkeys(taker for taker in self._takers[kind] if taker not in self._closed)
        target = self._find(origins, math.inf, partition)
        if target is not None:
            self._give(partition, kind, self._pass_on(origins, target))

    def level(self) -> None:
        """Pass partitions on from the most loaded to the less loaded, until no chain makes loads more equal."""
        while members := [member for member in self._seats if member not in self._closed]:
            highest = max(map(self._load.__getitem__, members))
            origins: _Origins = {member: None for member in members if self._load[member] == highest}
            target = self._find(origins, highest - 2)
            if target is not None:
                self._load[self._pass_on(origins, target)] -= 1

    def placements(self) -> Iterator[tuple[int, str]]:
        """Each partition that is held, with its holder."""
        for member, kinds in self._held.items():
            for held in kinds.values():
                yield from ((partition, member) for partition in held)

    def _kind(self, partition: int) -> int:
        pins = tuple(pin for pin, seat in self._pins.items() if seat.takes(partition))
        kind = self._kinds.setdefault(pins, len(self._kinds))
        if kind == len(self._takers):
            self._takers.append([member for member, seat in self._seats.items() if seat.pin in pins])
        return kind

    def _give(self, partition: int, kind: int, member: str) -> None:
        self._held[member].setdefault(kind, []).append(partition)

    def _find(self, origins: _Origins, most: float, partition: int = 0) -> str | None:
        """The best member with room and a load of at most ``most``, on the shortest chain from those in ``origins``.

        Adds to ``origins`` whom the search reached: for each the one who can give to it, and of which kind. If it
        found nobody, it closes all of them: they can give only to each other, and none of them takes more. That
        stays so, as searches ask for ever less: for room at first, and then for a load that only falls.
        """
        room, load = self._room, self._load
        opened: set[int] = set()
        layer = list(origins)
        while layer:
            if able := [member for member in layer if room[member] > load[member] <= most]:
                return self._best(able, origins, partition)
            layer = self._next_layer(layer, origins, opened)
        self._closed.update(origins)
        return None

    def _next_layer(self, layer: list[str], origins: _Origins, opened: set[int]) -> list[str]:
        reached: list[str] = []
        for giver in layer:
            for kind in [kind for kind, held in self._held[giver].items() if held and kind not in opened]:
                opened.add(kind)
                takers = [one for one in self._takers[kind] if one not in origins and one not in self._closed]
                origins.update(dict.fromkeys(takers, (giver, kind)))
                reached += takers
        return reached

    def _best(self, members: list[str], origins: _Origins, partition: int) -> str:
        """The least loaded; among equals by a hash, whose verdict on two does not depend on the others."""
        least = min(map(self._load.__getitem__, members))
        equals = [member for member in members if self._load[member] == least]
        offers = {origin: self._offer(origin, partition) for origin in set(map(origins.__getitem__, equals))}
        return min((zlib.crc32(self._names[member], offers[origins[member]]), member) for member in equals)[1]

    def _offer(self, origin: tuple[str, int] | None, partition: int) -> int:
        return partition if origin is None else self._held[origin[0]][origin[1]][-1]

    def _pass_on(self, origins: _Origins, target: str) -> str:
        """Move one partition along each link of the chain that ends at ``target``; who began it is one short."""
        self._load[target] += 1
        member = target
        while (origin := origins[member]) is not None:
            giver, kind = origin
            self._give(self._held[giver][kind].pop(), kind, member)
            member = giver
        return member
