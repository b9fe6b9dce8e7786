"""Who should own which partition: complete, fair, sticky, and the same wherever it is computed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conquiet import ConfigError
from conquiet.topics.consume.assignment import Seat, assign

NAMES = [f"pod-{number}" for number in range(12)]
PARTITIONS = st.lists(st.integers(0, 60), max_size=40, unique=True)

Owners = dict[int, str]


@st.composite
def anybody(draw: st.DrawFn) -> tuple[list[int], list[Seat], Owners]:
    """Members that take anything, and owners of whom some are gone."""
    partitions = draw(PARTITIONS)
    members = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    owners = draw(st.dictionaries(st.integers(0, 60), st.sampled_from(NAMES), max_size=40))
    return partitions, [Seat(member) for member in members], owners


def seats_of(members: Sequence[str]) -> st.SearchStrategy[list[Seat]]:
    """Seats of the members, pinned or not, capped or not."""
    pins = st.none() | st.tuples(st.integers(1, 4), st.integers(0, 8))
    wishes = st.lists(st.tuples(st.none() | st.integers(0, 6), pins), min_size=len(members), max_size=len(members))
    return wishes.map(
        lambda wishes: [
            Seat(member, most, *(pin or (None, None))) for member, (most, pin) in zip(members, wishes, strict=True)
        ]
    )


@st.composite
def choosy(draw: st.DrawFn, partitions: int = 40, members: int = 12) -> tuple[list[int], list[Seat], Owners]:
    """Members with caps and pins, and owners of whom some are gone, over their cap or not pinned there."""
    numbers = draw(st.lists(st.integers(0, 60), max_size=partitions, unique=True))
    names = draw(st.lists(st.sampled_from(NAMES[:members]), max_size=members, unique=True))
    owners = draw(st.dictionaries(st.sampled_from(numbers or [0]), st.sampled_from(NAMES[:members])))
    return numbers, draw(seats_of(names)), owners


def loads(seats: Iterable[Seat], assigned: Mapping[int, str]) -> Counter[str]:
    counted = Counter(dict.fromkeys((seat.member for seat in seats), 0))
    counted.update(assigned.values())
    return counted


def moves(owners: Mapping[int, str], seats: Iterable[Seat], assigned: Mapping[int, str]) -> int:
    """How many partitions leave a member that is alive."""
    alive = {seat.member for seat in seats}
    return sum(owners.get(partition) in alive - {member} for partition, member in assigned.items())


def fewest_moves(partitions: Sequence[int], seats: Sequence[Seat], owners: Mapping[int, str]) -> int:
    """The larger shares go to those who own most; what anybody owns beyond its share has to move."""
    owned = Counter(owners.get(partition) for partition in partitions)
    share, larger = divmod(len(partitions), len(seats))
    counts = sorted((owned[seat.member] for seat in seats), reverse=True)
    return sum(max(0, count - share - (place < larger)) for place, count in enumerate(counts))


# --- a seat ------------------------------------------------------------------------------------------


def test_a_seat_takes_anything_by_default() -> None:
    assert all(Seat("a").takes(partition) for partition in range(100))


@pytest.mark.parametrize("remainder", [1, 5, 401])
def test_a_pinned_seat_takes_what_has_its_remainder(remainder: int) -> None:
    seat = Seat("a", modulo=4, remainder=remainder)
    assert [partition for partition in range(12) if seat.takes(partition)] == [1, 5, 9]


@pytest.mark.parametrize(
    "change",
    [
        {"member": ""},
        {"member": None},
        {"member": "\ud800"},
        {"most": -1},
        {"most": 1.0},
        {"most": True},
        {"modulo": 0, "remainder": 0},
        {"modulo": True, "remainder": 0},
        {"remainder": -1, "modulo": 3},
        {"remainder": 0.0, "modulo": 3},
        {"modulo": 3},
        {"remainder": 0},
    ],
    ids=ascii,
)
def test_a_seat_outside_the_rules_is_refused_by_the_name_of_the_setting(change: dict[str, Any]) -> None:
    name, value = next(iter(change.items()))
    with pytest.raises(ConfigError, match=f"{name}.* must be ") as caught:
        Seat(**{"member": "a", **change})
    assert repr(value) in str(caught.value)


def test_seats_are_of_different_members() -> None:
    with pytest.raises(ConfigError, match="not twice of 'a'"):
        assign([0], [Seat("a"), Seat("b"), Seat("a", most=1)], {})


@pytest.mark.parametrize("partition", [-1, True, 1.0, "1", None], ids=repr)
def test_what_is_no_partition_is_named(partition: Any) -> None:
    with pytest.raises(ConfigError, match=r"partition must be an integer of at least 0, not "):
        assign([0, partition], [Seat("a")], {})


# --- by hand -----------------------------------------------------------------------------------------


def test_nobody_gets_nothing() -> None:
    assert assign([0, 1], [], {0: "a"}) == {}
    assert assign([], [Seat("a")], {0: "a"}) == {}


def test_one_gets_all() -> None:
    assert assign(range(5), [Seat("a")], {}) == dict.fromkeys(range(5), "a")


def test_a_newcomer_gets_its_share_and_nothing_else_moves() -> None:
    owners = {0: "a", 1: "a", 2: "a", 3: "b", 4: "b", 5: "b"}
    assigned = assign(range(6), [Seat("a"), Seat("b"), Seat("c")], owners)
    assert loads([], assigned) == {"a": 2, "b": 2, "c": 2}
    assert moves(owners, [Seat("a"), Seat("b")], assigned) == 2


def test_the_partitions_of_a_member_that_left_go_to_the_others_and_nothing_else_moves() -> None:
    owners = {0: "a", 1: "b", 2: "c", 3: "a", 4: "b", 5: "c"}
    assigned = assign(range(6), [Seat("a"), Seat("b")], owners)
    assert loads([], assigned) == {"a": 3, "b": 3}
    assert {partition: assigned[partition] for partition in (0, 1, 3, 4)} == {0: "a", 1: "b", 3: "a", 4: "b"}


def test_new_partitions_go_to_whoever_has_fewest() -> None:
    assert assign(range(4), [Seat("a"), Seat("b")], {0: "a", 1: "a"}) == {0: "a", 1: "a", 2: "b", 3: "b"}


def test_owners_of_what_is_no_partition_do_not_matter() -> None:
    assert assign([0], [Seat("a"), Seat("b")], {0: "b", 7: "b", 8: "b"}) == {0: "b"}


def test_a_partition_that_nobody_may_take_is_left_out() -> None:
    assert assign(range(3), [Seat("a", modulo=3, remainder=0), Seat("b", modulo=3, remainder=2)], {}) == {
        0: "a",
        2: "b",
    }


def test_a_cap_is_kept_even_if_partitions_stay_unowned() -> None:
    assert loads([], assign(range(10), [Seat("a", most=2), Seat("b", most=3), Seat("c", most=0)], {})) == {
        "a": 2,
        "b": 3,
    }


def test_what_a_capped_member_leaves_is_shared_by_the_others() -> None:
    assigned = assign(range(11), [Seat("a", most=1), Seat("b"), Seat("c")], dict.fromkeys(range(11), "a"))
    assert loads([], assigned) == {"a": 1, "b": 5, "c": 5}


def test_an_owner_above_its_cap_keeps_as_many_as_it_may() -> None:
    assigned = assign(range(6), [Seat("a", most=2), Seat("b")], dict.fromkeys(range(6), "a"))
    assert loads([], assigned) == {"a": 2, "b": 4}


def test_an_owner_that_is_pinned_elsewhere_loses_what_it_has() -> None:
    assert assign([0, 1], [Seat("a", modulo=2, remainder=1), Seat("b")], {0: "a", 1: "b"}) == {0: "b", 1: "a"}


def test_a_member_that_is_full_makes_room_for_what_only_it_may_take() -> None:
    seats = [Seat("a", most=1), Seat("b", most=1, modulo=2, remainder=0)]
    assert assign([0, 1], seats, {0: "a"}) == {0: "b", 1: "a"}


def test_room_is_made_along_a_chain() -> None:
    """1 is for ``a`` alone, who can pass 6 on to ``b`` alone, who can pass 4 on to ``c`` alone."""
    seats = [
        Seat("a", most=1, modulo=5, remainder=1),
        Seat("b", most=1, modulo=2, remainder=0),
        Seat("c", most=1, modulo=4, remainder=0),
    ]
    assert assign([1, 6, 4], seats, {6: "a", 4: "b"}) == {1: "a", 6: "b", 4: "c"}


def test_loads_are_made_equal_along_a_chain() -> None:
    """``a`` and ``c`` share no partition: ``b`` takes from the one and gives to the other."""
    seats = [Seat("a", modulo=2, remainder=0), Seat("b"), Seat("c", modulo=2, remainder=1)]
    assigned = assign(range(5), seats, {0: "a", 2: "a", 4: "a", 1: "b", 3: "b"})
    assert loads(seats, assigned) == {"a": 2, "b": 2, "c": 1}


def test_the_shortest_chain_is_taken() -> None:
    seats = [Seat("a", modulo=2, remainder=0), Seat("b"), Seat("c", modulo=2, remainder=1)]
    owners = {0: "a", 2: "a", 4: "a", 6: "b", 1: "b", 3: "b", 5: "c"}
    assigned = assign(range(7), seats, owners)
    assert loads(seats, assigned) == {"a": 3, "b": 2, "c": 2}
    assert moves(owners, seats, assigned) == 1


# --- whatever comes ----------------------------------------------------------------------------------


@given(anybody() | choosy(), st.randoms(use_true_random=False))
def test_the_order_of_the_arguments_does_not_matter(world: tuple[list[int], list[Seat], Owners], luck: Random) -> None:
    partitions, seats, owners = world
    assigned = assign(partitions, seats, owners)
    shuffled = list(owners.items())
    for items in (partitions, seats, shuffled):
        luck.shuffle(items)
    again = assign(partitions, seats, dict(shuffled))
    assert list(again.items()) == list(assigned.items())


@given(choosy())
def test_nobody_gets_what_it_does_not_take(world: tuple[list[int], list[Seat], Owners]) -> None:
    partitions, seats, owners = world
    assigned = assign(partitions, seats, owners)
    by_name = {seat.member: seat for seat in seats}
    assert assigned.keys() <= set(partitions)
    assert all(by_name[member].takes(partition) for partition, member in assigned.items())
    assert all(seat.most is None or loads(seats, assigned)[seat.member] <= seat.most for seat in seats)


@given(choosy(partitions=5, members=3))
def test_no_other_assignment_is_more_complete_or_fairer(world: tuple[list[int], list[Seat], Owners]) -> None:
    """Compared with every assignment that there is."""

    def rank(assigned: Mapping[int, str]) -> tuple[int, int]:
        return -len(assigned), sum(load**2 for load in loads(seats, assigned).values())

    partitions, seats, owners = world
    choices = [[None, *(seat.member for seat in seats if seat.takes(partition))] for partition in partitions]
    every = (
        {partition: member for partition, member in zip(partitions, chosen, strict=True) if member is not None}
        for chosen in product(*choices)
    )
    within = (
        assigned
        for assigned in every
        if all(seat.most is None or loads(seats, assigned)[seat.member] <= seat.most for seat in seats)
    )
    assert rank(assign(partitions, seats, owners)) == min(map(rank, within))


def most_that_can_be_owned(partitions: Sequence[int], seats: Sequence[Seat]) -> int:
    """The size of a largest matching of partitions with places, found one augmenting path at a time."""
    room = {seat.member: len(partitions) if seat.most is None else seat.most for seat in seats}
    places = [(seat, place) for seat in seats for place in range(room[seat.member])]
    taken: dict[tuple[Seat, int], int] = {}

    def fits(partition: int, tried: set[tuple[Seat, int]]) -> bool:
        for place in places:
            if place not in tried and place[0].takes(partition):
                tried.add(place)
                if place not in taken or fits(taken[place], tried):
                    taken[place] = partition
                    return True
        return False

    return sum(fits(partition, set()) for partition in partitions)


@given(choosy(partitions=16, members=6))
def test_no_partition_is_unowned_while_somebody_could_make_room(world: tuple[list[int], list[Seat], Owners]) -> None:
    partitions, seats, owners = world
    assert len(assign(partitions, seats, owners)) == most_that_can_be_owned(partitions, seats)


@given(choosy())
def test_members_that_take_anything_are_equal_to_within_one(world: tuple[list[int], list[Seat], Owners]) -> None:
    partitions, seats, owners = world
    counted = loads(seats, assign(partitions, seats, owners))
    free = [counted[seat.member] for seat in seats if seat.pin is None and seat.most is None]
    assert not free or max(free) - min(free) <= 1


@given(anybody())
def test_where_all_take_anything_all_is_owned_and_equal_and_the_fewest_move(
    world: tuple[list[int], list[Seat], Owners],
) -> None:
    partitions, seats, owners = world
    assigned = assign(partitions, seats, owners)
    counted = loads(seats, assigned)
    assert assigned.keys() == set(partitions)
    assert max(counted.values()) - min(counted.values()) <= 1
    assert moves(owners, seats, assigned) == fewest_moves(partitions, seats, owners)


@given(anybody() | choosy())
def test_once_everybody_has_what_it_should_nothing_moves(world: tuple[list[int], list[Seat], Owners]) -> None:
    partitions, seats, owners = world
    assigned = assign(partitions, seats, owners)
    assert assign(partitions, seats, assigned) == assigned


@given(anybody(), st.data())
def test_half_way_there_the_rest_of_the_way_is_as_short_as_before(
    world: tuple[list[int], list[Seat], Owners], data: st.DataObject
) -> None:
    """Members move one by one and look again in between: that must not add a move."""
    partitions, seats, owners = world
    assigned = assign(partitions, seats, owners)
    done = data.draw(st.sets(st.sampled_from(sorted(partitions))) if partitions else st.just(set()))
    half_way = {**owners, **{partition: assigned[partition] for partition in done}}
    both = moves(owners, seats, half_way) + moves(half_way, seats, assign(partitions, seats, half_way))
    assert both == fewest_moves(partitions, seats, owners)


@given(anybody())
def test_a_partition_on_its_way_is_still_expected_where_it_was(world: tuple[list[int], list[Seat], Owners]) -> None:
    """An owner gave one up and the new one has not come yet: nobody else has to move on that account."""
    partitions, seats, owners = world
    assigned = assign(partitions, seats, owners)
    for partition in partitions[:3]:
        given_up = {other: owner for other, owner in assigned.items() if other != partition}
        again = assign(partitions, seats, given_up)
        assert moves(given_up, seats, again) == 0
        assert again.keys() == assigned.keys()


def test_ties_do_not_all_go_to_one() -> None:
    """One partition each of many topics, say: the first member by name must not get them all."""
    seats = [Seat(name) for name in NAMES]
    first = Counter(assign([partition], seats, {})[partition] for partition in range(600))
    assert len(first) > len(NAMES) / 2
    assert max(first.values()) < 200


WORLDS: dict[str, tuple[list[Seat], Owners]] = {
    "nobody owns any": ([Seat(f"pod-{n}") for n in range(100)], {}),
    "one owns all": ([Seat(f"pod-{n}") for n in range(100)], dict.fromkeys(range(1024), "pod-0")),
    "half are new": ([Seat(f"pod-{n}") for n in range(100)], {p: f"pod-{p % 50}" for p in range(1024)}),
    "all are pinned": ([Seat(f"pod-{n}", modulo=100, remainder=n) for n in range(100)], {}),
    "caps and pins": (
        [Seat(f"pod-{n}", 9, n % 12 + 1, n) for n in range(100)],
        {p: f"pod-{p % 9}" for p in range(1024)},
    ),
}


@pytest.mark.parametrize("world", WORLDS)
def test_a_thousand_partitions_of_a_hundred_members_take_no_time(world: str) -> None:
    """Below 0.1 s on a developer's machine; the limit leaves room for a slow one."""
    seats, owners = WORLDS[world]
    before = time.process_time()
    assigned = assign(range(1024), seats, owners)
    assert time.process_time() - before < 1.0
    assert len(assigned) == (900 if world == "caps and pins" else 1024)
