"""The one lease: taken by one at a time, fenced by owner and epoch, never by the clock alone."""

from __future__ import annotations

import pytest

from tests.wire.desk import TTL, A, B, Desk, desk

__all__ = ["desk"]

pytestmark = pytest.mark.guarantee

# --- acquire -------------------------------------------------------------------------------------------------


async def test_a_free_lease_is_given_in_an_epoch_that_is_the_servers_time(desk: Desk) -> None:
    before = await desk.now()
    status, epoch, *about = await desk.acquire(A)
    assert (status, about) == (b"OK", [b"", b"", b"0-0"])
    held = await desk.fields()
    assert set(held) == {"owner", "epoch", "until_ms"}
    assert (held["owner"], held["epoch"]) == (A, epoch.decode())
    assert before <= int(epoch) <= await desk.now()
    assert before + TTL <= int(held["until_ms"]) <= await desk.now() + TTL


async def test_the_lease_has_no_ttl(desk: Desk) -> None:
    await desk.acquire(A)
    assert await desk.call("PTTL", desk.key) == -1


async def test_a_held_lease_is_refused_to_others_and_nothing_changes(desk: Desk) -> None:
    await desk.acquire(A)
    held = await desk.fields()
    status, owner, left = await desk.acquire(B)
    assert (status, owner) == (b"HELD", A.encode())
    assert 0 < left <= TTL
    assert await desk.fields() == held


async def test_acquiring_again_is_a_new_epoch_for_longer(desk: Desk) -> None:
    """An answer that was lost is asked for again; what was begun under the epoch that it told must not count."""
    epoch = await desk.hold(A)
    until = int((await desk.fields())["until_ms"])
    desk.later += 5000
    status, again, *about = await desk.acquire(A)
    assert (status, about) == (b"OK", [b"", b"", b"0-0"])
    assert int(again) >= epoch + 5000
    assert int((await desk.fields())["until_ms"]) >= until + 5000


async def test_one_that_ran_out_goes_to_another_in_the_next_epoch(desk: Desk) -> None:
    epoch = await desk.hold(A)
    desk.later += TTL + 1
    status, given, *about = await desk.acquire(B)
    assert (status, about) == (b"OK", [A.encode(), b"", b"0-0"])
    assert int(given) > epoch


async def test_one_that_was_released_goes_to_another_at_once_and_names_no_crash(desk: Desk) -> None:
    epoch = await desk.hold(A)
    assert await desk.release(A, epoch) == 1
    status, given, *about = await desk.acquire(B)
    assert (status, about) == (b"OK", [b"", b"", b"0-0"])
    assert int(given) > epoch


async def test_the_epoch_never_begins_again(desk: Desk) -> None:
    epochs: list[int] = []
    for number in range(5):
        owner = f"worker#{number % 2}"
        epochs.append(await desk.hold(owner))
        await desk.release(owner, epochs[-1])
    await desk.delete_group()
    epochs.append(await desk.hold(A))
    assert epochs == sorted(set(epochs))


async def test_a_clock_that_steps_back_does_not_take_the_epoch_back(desk: Desk) -> None:
    desk.later = 3_600_000
    epoch = await desk.hold(A)
    desk.later = 0
    assert await desk.release(A, epoch) == 1
    assert await desk.hold(B) == epoch + 1


async def test_a_clock_that_steps_forward_ends_a_lease_at_once_and_fences_its_owner(desk: Desk) -> None:
    """The owner cannot know: its own clock did not step. What it says after another took over changes nothing."""
    before = await desk.hold(A)
    desk.later = 86_400_000
    after = await desk.hold(B)
    held = await desk.fields()
    assert after > before
    assert await desk.renew(A, before) == 0
    await desk.release(A, before)
    assert await desk.fields() == held
    desk.later = 0  # it was set right again: the new owner is the owner, and has its lease for so much longer
    assert await desk.renew(B, after) == 1


async def test_after_a_step_forward_the_owner_goes_on_if_nobody_took_over(desk: Desk) -> None:
    epoch = await desk.hold(A)
    desk.later = 86_400_000
    assert await desk.renew(A, epoch) == 1


# --- a server that lost its last writes ----------------------------------------------------------------------


async def test_an_epoch_that_the_server_forgot_is_not_given_again(desk: Desk) -> None:
    """Else what the owner had under way before would count under the lease that it took after."""
    await desk.release(A, await desk.hold(A))
    saved = await desk.call("DUMP", desk.key)
    desk.later += 10
    forgotten = await desk.hold(A)
    await desk.call("RESTORE", desk.key, 0, saved, "REPLACE")
    desk.later += 10
    recorded = await desk.hold(A)
    held = await desk.fields()
    assert recorded > forgotten
    assert await desk.renew(A, forgotten) == 0
    assert await desk.suspect(A, forgotten, "5-1") == 0
    assert await desk.release(A, forgotten) == 0
    assert await desk.fields() == held
    assert await desk.renew(A, recorded) == 1


async def test_only_the_claim_that_the_server_records_is_accepted(desk: Desk) -> None:
    """A replica that lags behind knows the owner before: who took the lease since has nothing, and takes it anew."""
    first = await desk.hold(A)
    saved = await desk.call("DUMP", desk.key)
    desk.later += TTL + 1
    second = await desk.hold(B)
    await desk.call("RESTORE", desk.key, 0, saved, "REPLACE")
    assert await desk.renew(B, second) == 0
    assert await desk.renew(A, first) == 1
    desk.later += TTL + 1
    assert await desk.hold(B) > second


async def test_a_group_that_is_deleted_and_made_again_goes_on_with_higher_epochs(desk: Desk) -> None:
    """Also if the server's clock was set back between: what is left of the group remembers, for a day."""
    desk.later = 3_600_000
    epoch = await desk.hold(A)
    await desk.delete_group()
    assert 0 < await desk.call("PTTL", desk.key) <= 86_400_000
    desk.later = 0
    assert await desk.hold(A) > epoch
    assert await desk.call("PTTL", desk.key) == -1
    assert await desk.renew(A, epoch) == 0


async def test_an_owner_that_comes_back_after_it_was_replaced_has_a_new_epoch(desk: Desk) -> None:
    epoch = await desk.hold(A)
    desk.later += TTL + 1
    between = await desk.hold(B)
    desk.later += TTL + 1
    status, given, crashed, *_ = await desk.acquire(A)
    assert (status, crashed) == (b"OK", B.encode())
    assert int(given) > between > epoch
    assert await desk.renew(A, epoch) == 0


async def test_the_next_owner_is_told_what_was_being_handled(desk: Desk) -> None:
    epoch = await desk.hold(A)
    assert await desk.suspect(A, epoch, "5-1") == 1
    desk.later += TTL + 1
    assert (await desk.acquire(B))[2:4] == [A.encode(), b"5-1"]


async def test_it_is_told_again_when_that_answer_was_lost(desk: Desk) -> None:
    """Else a crash would not be counted."""
    epoch = await desk.hold(A)
    await desk.suspect(A, epoch, "5-1")
    desk.later += TTL + 1
    first = await desk.acquire(B)
    assert first[2:] == [A.encode(), b"5-1", b"0-0"]
    assert (await desk.acquire(B))[2:] == first[2:]


async def test_the_owner_after_that_is_told_of_no_older_crash(desk: Desk) -> None:
    epoch = await desk.hold(A)
    await desk.suspect(A, epoch, "5-1")
    desk.later += TTL + 1
    await desk.release(B, await desk.hold(B))
    assert (await desk.acquire(A))[2:4] == [b"", b""]


async def test_the_server_time_decides_and_not_a_clock_that_is_ahead(desk: Desk) -> None:
    await desk.acquire(A)
    desk.later += TTL - 1000
    assert (await desk.acquire(B))[0] == b"HELD"


# --- renew and release ----------------------------------------------------------------------------------------


async def test_renewing_prolongs_it(desk: Desk) -> None:
    epoch = await desk.hold(A)
    desk.later += 10_000
    assert await desk.renew(A, epoch) == 1
    desk.later += 10_000
    assert (await desk.acquire(B))[0] == b"HELD"


async def test_a_late_renewal_is_good_while_nobody_has_taken_over(desk: Desk) -> None:
    epoch = await desk.hold(A)
    desk.later += 10 * TTL
    assert await desk.renew(A, epoch) == 1
    assert (await desk.acquire(B))[0] == b"HELD"


@pytest.mark.parametrize(("owner", "by"), [(B, 0), (A, 1), (A, -1), ("", 0), ("worker-1#b", 0), ("worker-1", 0)])
async def test_neither_another_owner_nor_another_epoch_can_use_it(desk: Desk, owner: str, by: int) -> None:
    epoch = await desk.hold(A)
    await desk.suspect(A, epoch, "5-1")
    held = await desk.fields()
    desk.later += 1000
    assert await desk.renew(owner, epoch + by) == 0
    assert await desk.release(owner, epoch + by) == 0
    assert await desk.suspect(owner, epoch + by, "6-1") == 0
    assert await desk.fields() == held


async def test_after_the_takeover_the_old_owner_can_do_nothing(desk: Desk) -> None:
    epoch = await desk.hold(A)
    desk.later += TTL + 1
    await desk.acquire(B)
    held = await desk.fields()
    assert await desk.renew(A, epoch) == 0
    assert await desk.release(A, epoch) == 0
    assert await desk.fields() == held


async def test_renewing_never_creates(desk: Desk) -> None:
    assert await desk.renew(A, 1) == -1
    assert await desk.call("EXISTS", desk.key) == 0


async def test_a_released_lease_cannot_be_renewed_or_released_again(desk: Desk) -> None:
    epoch = await desk.hold(A)
    assert await desk.release(A, epoch) == 1
    assert await desk.renew(A, epoch) == 0
    assert await desk.release(A, epoch) == 0
    assert (await desk.fields())["epoch"] == str(epoch)


async def test_releasing_takes_the_name_off_the_group_unless_entries_are_pending_under_it(desk: Desk) -> None:
    async def names() -> list[bytes]:
        return [row[1] for row in await desk.call("XINFO", "CONSUMERS", desk.stream, desk.group)]

    epoch = await desk.hold(A)
    id = await desk.call("XADD", desk.stream, "*", "payload", "1")
    await desk.call("XREADGROUP", "GROUP", desk.group, A, "STREAMS", desk.stream, ">")
    await desk.release(A, epoch)
    assert await names() == [A.encode()]
    epoch = await desk.hold(A)
    await desk.call("XACK", desk.stream, desk.group, id.decode())
    await desk.release(A, epoch)
    assert await names() == []


async def test_no_suspect_is_left_when_it_was_handled_or_the_lease_released(desk: Desk) -> None:
    epoch = await desk.hold(A)
    await desk.suspect(A, epoch, "5-1")
    assert await desk.suspect(A, epoch, "") == 1
    assert "running" not in await desk.fields()
    await desk.suspect(A, epoch, "6-1")
    await desk.release(A, epoch)
    assert (await desk.acquire(B))[3] == b""
