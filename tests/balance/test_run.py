"""Running a handler on each owned stream: what its return, its failure and the loss of its stream mean."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from conquiet.balance import StreamLease, running
from conquiet.errors import ConfigError, LeaseLostError, StreamNotOwnedError
from conquiet.kit.policy import Backoff
from conquiet.wire.scripts import Script
from tests.balance.crew import Crew, Handler, Member
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually, turns

pytestmark = pytest.mark.cluster_too


async def nothing(stream: str, lease: StreamLease) -> None:
    """A handler whose work is done."""


async def calm(crew: Crew, handler: Handler, count: int) -> None:
    """Return once it was called so many times; time passes, so that it waits for nothing."""

    def is_there() -> bool:
        crew.clock.advance(0.5)
        return len(handler.calls) >= count

    await eventually(is_there, f"{count} calls, not {handler.calls}")


async def taken(member: Member, crew: Crew, stream: str) -> Member:
    """The thief that has a member's stream now."""
    await crew.ask("ZADD", crew.keys.leases, 1, stream)
    thief = await crew.join("thief", max_streams=1)
    await thief.owns(stream)
    crew.clock.advance(5)
    return thief


# --- the end of a handler -----------------------------------------------------------------------------------------


async def test_a_handler_that_returns_has_finished_its_stream(crew: Crew) -> None:
    handler = Handler(nothing)
    member = await crew.running("m", handler)
    for name in ("s1", "s2", "s3"):
        await member.balancer.add_stream(name)
    await eventually(lambda: _is_empty(crew), "all to be finished")
    assert sorted(handler.streams) == ["s1", "s2", "s3"]
    assert member.owned == set()
    assert crew.counted("ended_total", how="finished") == 3
    await member.balancer.add_stream("s1")
    await eventually(lambda: handler.streams.count("s1") == 2, "the same stream once more")


async def _is_empty(crew: Crew) -> bool:
    return bool(await crew.size() == 0 and not await crew.ask("EXISTS", crew.keys.owners))


async def test_the_handler_gets_the_stream_and_its_lease(crew: Crew) -> None:
    got: list[tuple[str, StreamLease]] = []

    async def handle(stream: str, lease: StreamLease) -> None:
        got.append((stream, lease))
        assert lease.owned

    member = await crew.running("m", handle)
    await member.balancer.add_stream("s", {"a": 1})
    await eventually(lambda: bool(got), "a call")
    [(stream, lease)] = got
    assert (stream, lease.stream, lease.info) == ("s", "s", {"a": 1})
    await eventually(lambda: not lease.owned, "it to be over")


class _Odd(Exception):
    pass


@pytest.mark.parametrize(
    "error", [_Odd("odd"), LeaseLostError("of something else"), StreamNotOwnedError("other"), asyncio.CancelledError()]
)
async def test_a_handler_that_raises_is_called_again_and_its_stream_stays_owned(
    crew: Crew, error: BaseException
) -> None:
    owned: list[bool] = []

    async def fail_twice(stream: str, lease: StreamLease) -> None:
        owned.append(lease.owned)
        if len(owned) <= 2:
            raise error

    handler = Handler(fail_twice)
    member = await crew.running("m", handler, lease_ttl=600.0)
    await member.balancer.add_stream("s")
    await calm(crew, handler, 3)
    assert handler.streams == ["s"] * 3
    assert len(set(handler.calls)) == 1, "one lease"
    assert owned == [True] * 3
    await eventually(lambda: _is_empty(crew), "it to be finished")


async def test_a_failing_handler_does_not_hold_up_the_others(crew: Crew) -> None:
    async def handle(stream: str, lease: StreamLease) -> None:
        if stream == "bad":
            raise _Odd

    handler = Handler(handle)
    member = await crew.running("m", handler)
    for name in ("bad", "s1", "s2"):
        await member.balancer.add_stream(name)
    await eventually(lambda: {"s1", "s2"} <= set(handler.streams), "the others")
    await member.owns("bad")


async def test_it_waits_before_it_calls_a_failed_handler_again(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_AGAIN", Backoff(base=10, cap=10, kind="fixed"))

    async def fail(stream: str, lease: StreamLease) -> None:
        raise _Odd

    handler = Handler(fail)
    member = await crew.running("m", handler)
    await member.balancer.add_stream("s")
    await eventually(lambda: bool(handler.calls), "a call")
    assert len(handler.calls) == 1
    crew.clock.advance(10)
    await eventually(lambda: len(handler.calls) == 2, "another")


async def test_a_handler_may_finish_or_release_its_stream_itself(crew: Crew) -> None:
    member: Member

    async def handle(stream: str, lease: StreamLease) -> None:
        if stream == "done":
            await member.balancer.done_stream(stream)
        elif handler.streams.count(stream) < 3:
            await member.balancer.release_stream(stream)

    handler = Handler(handle)
    member = await crew.running("m", handler)
    for name in ("done", "released"):
        await member.balancer.add_stream(name)
    await eventually(lambda: _is_empty(crew), "both to be finished")
    assert handler.streams.count("done") == 1
    assert crew.counted("ended_total", how="lost") == 0


@pytest.mark.one_node
async def test_a_handler_that_returned_is_not_called_again_if_finishing_fails_for_a_while(
    crew: Crew, proxy: Proxy
) -> None:
    await crew.running("warm", nothing, max_streams=1)  # so that the server knows the script
    await crew.add("w")
    await eventually(lambda: _is_empty(crew), "the script to be known")
    await crew.members.pop().balancer.aclose()
    handler = Handler(nothing)
    member = await crew.running("m", handler, url=proxy.url)
    proxy.refuse(Script.named("balance_finish").sha.encode(), b"-LOADING loading\r\n", times=2)
    await member.balancer.add_stream("s")
    await eventually(lambda: handler.streams == ["s"], "the call")

    async def is_over() -> bool:
        crew.clock.advance(0.5)
        return await _is_empty(crew)

    await eventually(is_over, "it to be finished in the end")
    assert handler.streams == ["s"]


@pytest.mark.one_node
async def test_a_handler_that_returned_is_not_called_again_if_the_answer_to_finishing_is_lost(
    crew: Crew, proxy: Proxy
) -> None:
    handler = Handler(nothing)
    member = await crew.running("m", handler, url=proxy.url)
    cut = proxy.cut(Script.named("balance_finish").text.encode())  # the script itself, the first time that it is sent
    cut_again = proxy.cut(Script.named("balance_finish").sha.encode(), skip=1)
    await member.balancer.add_stream("s1")
    await eventually(lambda: cut.is_set() or cut_again.is_set() or handler.streams == ["s1"], "the call")

    async def is_over() -> bool:
        crew.clock.advance(0.5)
        return await _is_empty(crew)

    await eventually(is_over, "it to be finished in the end")
    await member.looks_again()
    assert handler.streams == ["s1"]


# --- loss ---------------------------------------------------------------------------------------------------------


async def test_a_handler_whose_stream_is_lost_is_cancelled_and_the_others_go_on(crew: Crew) -> None:
    handler = Handler()
    member = await crew.running("m", handler)
    for name in ("s1", "s2"):
        await member.balancer.add_stream(name)
    await eventually(lambda: len(handler.calls) == 2, "both to run")
    await taken(member, crew, "s1")
    await eventually(lambda: handler.ended == ["s1"], "the handler to be cancelled")
    assert member.owned == {"s2"}


async def test_a_plain_handler_finds_out_that_its_stream_is_lost(crew: Crew) -> None:
    begun, over = threading.Event(), threading.Event()

    def handle(stream: str, lease: StreamLease) -> None:
        begun.set()
        while lease.owned:
            time.sleep(0.01)  # what a plain handler does that looks at its lease
        over.set()

    member = await crew.running("m", handle)
    await member.balancer.add_stream("s")
    await eventually(begun.is_set, "the handler to run")
    thief = await taken(member, crew, "s")
    await eventually(over.is_set, "the handler to see it")
    assert await crew.size() == 1
    assert thief.balancer.owned["s"].owned


async def test_what_a_dead_runner_left_is_handled_by_another(crew: Crew) -> None:
    dead, heir = Handler(), Handler(nothing)
    first = await crew.running("first", dead)
    await first.balancer.add_stream("s", {"a": 1})
    await eventually(lambda: dead.streams == ["s"], "the first to run")
    await crew.die(first)
    await crew.running("second", heir)
    await eventually(lambda: heir.streams == ["s"], "the second to run")
    await eventually(lambda: _is_empty(crew), "it to be finished")


@pytest.mark.slow
async def test_who_runs_takes_over_without_being_asked(crew: Crew) -> None:
    heir = Handler()
    first = await crew.join("first")
    await first.balancer.add_stream("s1")
    await first.balancer.add_stream("s2")
    await first.owns("s1", "s2")
    await crew.running("second", heir)
    await crew.lag_behind(4)
    await first.vanish()
    await crew.lag_behind(16)
    await eventually(lambda: sorted(heir.streams) == ["s1", "s2"], "the heir to run both")


# --- stopping -----------------------------------------------------------------------------------------------------


async def test_stop_ends_it_and_closing_hands_over_at_once(crew: Crew) -> None:
    handler, heir = Handler(), Handler()
    first = await crew.running("first", handler, lease_ttl=600.0)
    await first.balancer.add_stream("s")
    await eventually(lambda: handler.streams == ["s"], "the handler to run")
    await crew.running("second", heir, lease_ttl=600.0, sweep_interval=600.0)
    first.balancer.stop()
    await first.ended()
    assert handler.ended == ["s"]
    await first.balancer.aclose()
    await eventually(lambda: heir.streams == ["s"], "the other to run it")


async def test_a_handler_ends_before_the_next_owner_begins(crew: Crew) -> None:
    log: list[str] = []
    tidied = asyncio.Event()

    def logged(name: str) -> Callable[..., Any]:
        async def handle(stream: str, lease: StreamLease) -> None:
            log.append(f"{name} begins")
            try:
                await asyncio.Event().wait()
            finally:
                await tidied.wait()
                log.append(f"{name} ends")

        return handle

    first = await crew.running("first", logged("first"))
    await first.balancer.add_stream("s")
    await eventually(lambda: log == ["first begins"], "the first to run")
    second = await crew.running("second", logged("second"))
    closing = asyncio.ensure_future(first.balancer.aclose())
    await second.looks_again()
    assert log == ["first begins"]
    tidied.set()
    await closing
    await eventually(lambda: len(log) == 3, "the second to run")
    assert log == ["first begins", "first ends", "second begins"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "share"])
async def test_a_plain_handler_that_heeds_its_lease_ends_before_the_next_owner_begins(crew: Crew, how: str) -> None:
    running: dict[str, int] = {}
    overlaps: list[str] = []

    def handle(stream: str, lease: StreamLease) -> None:
        running[stream] = running.get(stream, 0) + 1
        if running[stream] > 1:
            overlaps.append(stream)
        while lease.owned:
            time.sleep(0.01)  # what a plain handler does that looks at its lease
        time.sleep(0.4)  # it has something to tidy up
        running[stream] -= 1

    first = await crew.running("first", handle)
    for name in ("s1", "s2"):
        await first.balancer.add_stream(name)
    await eventually(lambda: sum(running.values()) == 2, "both to run")
    second = await crew.running("second", handle)
    if how == "close":
        await first.balancer.aclose()
    for _ in range(8):
        await crew.lag_behind(4)
        await second.looks_again(1)
    await eventually(lambda: bool(second.owned), "the second to have some")
    assert overlaps == []


async def test_plain_handlers_run_in_threads_side_by_side(crew: Crew) -> None:
    together = threading.Barrier(3)

    def handle(stream: str, lease: StreamLease) -> None:
        assert threading.current_thread() is not threading.main_thread()
        together.wait(LONG)  # nobody gets further before all three are here

    member = await crew.running("m", handle)
    for name in ("s1", "s2", "s3"):
        await member.balancer.add_stream(name)
    await eventually(lambda: _is_empty(crew), "all to be finished")


async def test_a_plain_function_that_gives_an_awaitable_is_awaited(crew: Crew) -> None:
    handler = Handler(nothing)
    member = await crew.running("m", lambda stream, lease: handler(stream, lease))
    await member.balancer.add_stream("s")
    await eventually(lambda: handler.ended == ["s"], "it to be awaited")


async def test_what_was_taken_before_it_ran_is_handled_too(crew: Crew) -> None:
    member = await crew.join("m", listen=False)
    await member.balancer.add_stream("s")
    await member.owns("s")
    handler = Handler()
    member.run(handler)
    await eventually(lambda: handler.streams == ["s"], "the handler to run")


async def test_it_can_be_cancelled(crew: Crew) -> None:
    handler = Handler()
    member = await crew.running("m", handler)
    await member.balancer.add_stream("s")
    await eventually(lambda: handler.streams == ["s"], "the handler to run")
    assert member.task is not None
    member.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await member.task
    assert handler.ended == ["s"]
    assert member.owned == {"s"}


async def test_only_one_handler_runs_at_a_time_and_only_callables_and_only_when_open(crew: Crew) -> None:
    member = await crew.running("m", nothing)
    await turns()
    with pytest.raises(ConfigError, match="already"):
        await member.balancer.run(nothing)
    idle = await crew.join("idle")
    with pytest.raises(ConfigError, match="handler must be callable, not 7"):
        await idle.balancer.run(7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not open"):
        await crew.make("closed").run(nothing)
