"""SIGTERM and SIGINT as a request to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from conquiet.kit.signals import stop_on_signals

NUMBERS = (signal.SIGTERM, signal.SIGINT)
both = pytest.mark.parametrize("number", NUMBERS, ids=[number.name for number in NUMBERS])


class Handler:
    """A handler of the user's, which counts."""

    def __init__(self, order: list[str] | None = None) -> None:
        self.calls = 0
        self.order = order if order is not None else []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.calls += 1
        self.order.append("handler")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Whatever a test does to them, the handlers of the test run stay."""
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(params=NUMBERS, ids=[number.name for number in NUMBERS])
def number(request: pytest.FixtureRequest) -> signal.Signals:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def user(number: signal.Signals) -> Handler:
    handler = Handler()
    signal.signal(number, handler)
    return handler


def handler_of(number: signal.Signals) -> object:
    return signal.getsignal(number)


def test_the_signal_calls_stop(number: signal.Signals, user: Handler) -> None:
    """spec 1 §6.3, spec 2 §5.1: on stop() or SIGTERM."""
    stops: list[int] = []
    with stop_on_signals(lambda: stops.append(1)):
        assert stops == []
        signal.raise_signal(number)
        assert stops == [1]


def test_a_signal_from_outside_calls_stop(number: signal.Signals, user: Handler) -> None:
    stops: list[int] = []
    with stop_on_signals(lambda: stops.append(1)):
        os.kill(os.getpid(), number)
        for _ in range(1_000):  # Python runs handlers between two steps of the main thread
            if stops:
                break
    assert stops == [1]


def test_the_users_handler_runs_too_after_stop(number: signal.Signals) -> None:
    order: list[str] = []
    signal.signal(number, Handler(order))
    with stop_on_signals(lambda: order.append("stop")):
        signal.raise_signal(number)
    assert order == ["stop", "handler"]


def test_the_handlers_are_put_back(number: signal.Signals, user: Handler) -> None:
    with stop_on_signals(lambda: None):
        assert handler_of(number) is not user
    assert handler_of(number) is user
    signal.raise_signal(number)
    assert user.calls == 1


@both
@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.default_int_handler], ids=["SIG_DFL", "Python's"])
def test_default_handlers_are_put_back(number: signal.Signals, before: Any) -> None:
    signal.signal(number, before)
    with stop_on_signals(lambda: None):
        pass
    assert signal.getsignal(number) == before


def test_the_handlers_are_put_back_after_an_error(number: signal.Signals, user: Handler) -> None:
    with pytest.raises(RuntimeError), stop_on_signals(lambda: None):
        raise RuntimeError
    assert signal.getsignal(number) is user


def test_the_handlers_are_put_back_after_a_signal(number: signal.Signals, user: Handler) -> None:
    with stop_on_signals(lambda: None):
        signal.raise_signal(number)
    assert signal.getsignal(number) is user


def test_a_handler_that_came_later_is_left_in_place(number: signal.Signals, user: Handler) -> None:
    later = Handler()
    with stop_on_signals(lambda: None):
        signal.signal(number, later)
    assert signal.getsignal(number) is later


def test_a_second_signal_reaches_only_what_was_there_before(number: signal.Signals, user: Handler) -> None:
    stops: list[int] = []
    with stop_on_signals(lambda: stops.append(1)):
        signal.raise_signal(number)
        signal.raise_signal(number)
        signal.raise_signal(number)
    assert (stops, user.calls) == ([1], 3)


def test_a_second_ctrl_c_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stops: list[int] = []
    with stop_on_signals(lambda: stops.append(1)):
        signal.raise_signal(signal.SIGINT)
        assert stops == [1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stops == [1]


def test_the_two_signals_are_apart() -> None:
    handlers = {number: Handler() for number in NUMBERS}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    stops: list[int] = []
    with stop_on_signals(lambda: stops.append(1)):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert stops == [1, 1]
    assert [handler.calls for handler in handlers.values()] == [1, 1]


def test_two_nested_consumers_both_stop(number: signal.Signals, user: Handler) -> None:
    stops: list[str] = []
    with stop_on_signals(lambda: stops.append("outer")), stop_on_signals(lambda: stops.append("inner")):
        signal.raise_signal(number)
        assert sorted(stops) == ["inner", "outer"]
        assert user.calls == 1
        signal.raise_signal(number)
    assert (sorted(stops), user.calls) == (["inner", "outer"], 2)
    assert signal.getsignal(number) is user


def test_two_nested_consumers_stop_on_pythons_own_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stops: list[str] = []
    with stop_on_signals(lambda: stops.append("outer")), stop_on_signals(lambda: stops.append("inner")):
        signal.raise_signal(signal.SIGINT)
        assert sorted(stops) == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_inner_one_gone_the_outer_one_still_stops(number: signal.Signals, user: Handler) -> None:
    stops: list[str] = []
    with stop_on_signals(lambda: stops.append("outer")):
        with stop_on_signals(lambda: stops.append("inner")):
            pass
        signal.raise_signal(number)
    assert (stops, user.calls) == (["outer"], 1)


def test_left_out_of_order_the_later_one_still_stops(number: signal.Signals, user: Handler) -> None:
    stops: list[str] = []
    first = stop_on_signals(lambda: stops.append("first"))
    second = stop_on_signals(lambda: stops.append("second"))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    signal.raise_signal(number)
    assert (stops, user.calls) == (["second"], 1)
    second.__exit__(None, None, None)
    signal.raise_signal(number)
    assert (stops, user.calls) == (["second"], 2)


def test_left_out_of_order_nothing_stops_afterwards(number: signal.Signals, user: Handler) -> None:
    stops: list[str] = []
    first = stop_on_signals(lambda: stops.append("first"))
    second = stop_on_signals(lambda: stops.append("second"))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert handler_of(number) is user
    signal.raise_signal(number)
    assert (stops, user.calls) == ([], 1)


def test_an_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    stops: list[int] = []
    with stop_on_signals(lambda: stops.append(1)):
        assert signal.getsignal(number) == signal.SIG_IGN
        signal.raise_signal(number)
    assert stops == []
    assert signal.getsignal(number) == signal.SIG_IGN


def test_outside_the_main_thread_nothing_is_installed(number: signal.Signals, user: Handler) -> None:
    found: list[Any] = []

    def work() -> None:
        with stop_on_signals(lambda: pytest.fail("not asked for")):
            found.append(signal.getsignal(number))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [user]
    assert signal.getsignal(number) is user


def test_left_in_another_thread_it_only_passes_signals_on(number: signal.Signals, user: Handler) -> None:
    stops: list[int] = []
    block = stop_on_signals(lambda: stops.append(1))
    block.__enter__()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(block.__exit__, None, None, None).result()
    signal.raise_signal(number)
    assert (stops, user.calls) == ([], 1)


# --- with asyncio ------------------------------------------------------------------------------------


def run(main: Callable[[], Any]) -> Any:
    """As a program would: with Python's own Ctrl-C underneath."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, Handler())
    return asyncio.run(main())


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


@both
def test_under_asyncio_run_a_signal_stops_and_does_not_cancel(number: signal.Signals) -> None:
    async def main() -> str:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        with stop_on_signals(lambda: _wake(loop, stopped)):
            loop.call_soon(signal.raise_signal, number)
            await asyncio.wait_for(stopped.wait(), 20)
            await asyncio.sleep(0)
        return "ended by itself"

    assert run(main) == "ended by itself"


def test_under_asyncio_run_a_second_ctrl_c_cancels() -> None:
    outcomes: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with stop_on_signals(lambda: outcomes.append("stop")):
            loop.call_soon(signal.raise_signal, signal.SIGINT)
            loop.call_later(0.01, signal.raise_signal, signal.SIGINT)
            try:
                await asyncio.wait_for(asyncio.Event().wait(), 20)
            except asyncio.CancelledError:
                outcomes.append("cancelled")
                raise

    with pytest.raises(KeyboardInterrupt):
        run(main)
    assert outcomes == ["stop", "cancelled"]


def test_after_the_block_ctrl_c_is_asyncios_again() -> None:
    async def main() -> None:
        with stop_on_signals(lambda: pytest.fail("not asked for")):
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await asyncio.wait_for(asyncio.Event().wait(), 20)

    with pytest.raises(KeyboardInterrupt):
        run(main)


@both
def test_a_signal_handler_of_the_loop_runs_too(number: signal.Signals) -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        order: list[str] = []
        called = asyncio.Event()

        def users() -> None:
            order.append("user")
            called.set()

        loop.add_signal_handler(number, users)
        with stop_on_signals(lambda: order.append("stop")):
            loop.call_soon(signal.raise_signal, number)
            await asyncio.wait_for(called.wait(), 20)
        loop.remove_signal_handler(number)
        return order

    assert sorted(run(main)) == ["stop", "user"]


# --- with the real defaults --------------------------------------------------------------------------

SECOND_SIGNAL = """
import signal
from conquiet.kit.signals import stop_on_signals
with stop_on_signals(lambda: print("stop", flush=True)):
    signal.raise_signal(signal.{name})
    print("still here", flush=True)
    signal.raise_signal(signal.{name})
print("not reached")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", -signal.SIGTERM), ("SIGINT", -signal.SIGINT)])
def test_a_second_signal_ends_a_program_without_handlers(name: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SECOND_SIGNAL.format(name=name)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "stop\nstill here\n"
    assert done.returncode == code


OUT_OF_ORDER = """
import signal
from conquiet.kit.signals import stop_on_signals
first, second = stop_on_signals(lambda: print("first")), stop_on_signals(lambda: print("second"))
first.__enter__()
second.__enter__()
first.__exit__(None, None, None)
second.__exit__(None, None, None)
print("done", flush=True)
signal.raise_signal(signal.SIGTERM)
print("not reached")
"""


@pytest.mark.slow
def test_left_out_of_order_the_default_still_ends_the_program() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_ORDER],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.stdout, done.returncode) == ("done\n", -signal.SIGTERM)


def test_one_that_was_left_behind_takes_no_part() -> None:
    """Two that are left out of order leave a spent one installed; the next stop must not end the process."""
    stopped: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    first, second = stop_on_signals(lambda: None), stop_on_signals(lambda: None)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    try:
        with stop_on_signals(lambda: stopped.append("once")):
            signal.raise_signal(signal.SIGTERM)
        assert stopped == ["once"]
    finally:
        signal.signal(signal.SIGTERM, before)
