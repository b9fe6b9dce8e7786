"""Topics in plain programs: what signals, forks and the end of a program do to a consumer."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Iterator

import pytest

from conquiet.sync import (
    Broker,
)
from tests.sync.programs import run, running
from tests.sync.scripts import topics

pytestmark = [pytest.mark.any_server, pytest.mark.slow]

INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
SERIAL_OR_NOT = pytest.mark.parametrize("max_inflight", [1, 8])


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
def broker(url: str, namespace: str) -> Iterator[Broker]:
    with Broker.connect(url, namespace=namespace) as broker:
        broker.create_topic("orders", partitions=2)
        yield broker


# --- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [INT, TERM])
@SERIAL_OR_NOT
def test_a_signal_ends_the_wait_and_the_partitions_are_handed_over(
    url: str, namespace: str, number: signal.Signals, max_inflight: int
) -> None:
    with running(topics.waiting, url, namespace, "True", str(max_inflight)) as program:
        assert program.line() == "ready"
        program.signal(number)
        assert program.end().went_well() == [
            "ended",
            "pending 0 members 0 unowned 2",
            "signals as before True",
        ]


@SERIAL_OR_NOT
def test_ctrl_c_that_nobody_handles_interrupts_the_wait_and_nothing_else(
    url: str, namespace: str, max_inflight: int
) -> None:
    with running(topics.waiting, url, namespace, "False", str(max_inflight)) as program:
        assert program.line() == "ready"
        program.signal(INT)
        assert program.end().went_well() == [
            "interrupted True",
            "went on 1",
            "pending 0 members 0 unowned 2",
            "signals as before True",
        ]


@pytest.mark.parametrize("number", [INT, TERM])
@SERIAL_OR_NOT
def test_a_first_signal_lets_the_handler_finish(
    url: str, namespace: str, number: signal.Signals, max_inflight: int
) -> None:
    with running(topics.handling, url, namespace, "True", str(max_inflight)) as program:
        assert program.line() == f"handling {max_inflight == 1}"
        program.signal(number)
        assert program.line() == "stopping"
        program.signal(USR1)
        assert program.line() == "handled"
        last = program.end().went_well()[-1]
    pending, members = last.split()[1], last.split()[3]
    assert int(pending) <= 2, "the one that was being handled is done, the others are for the next"
    assert members == "0"


@pytest.mark.slow
def test_a_second_ctrl_c_interrupts_the_handler_and_its_message_stays(url: str, namespace: str) -> None:
    with running(topics.handling, url, namespace, "True", "1") as program:
        assert program.line() == "handling True"
        program.signal(INT)
        assert program.line() == "stopping"
        program.signal(INT)
        assert program.end().lines == ["interrupted", "pending 1 members 0 unowned 1"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [INT, TERM])
def test_a_signal_ends_a_loop_over_messages(url: str, namespace: str, number: signal.Signals) -> None:
    with running(topics.pulling, url, namespace) as program:
        assert program.line() == "got 1"
        program.signal(number)
        assert program.end().went_well() == ["ended", "pending 1 members 0 unowned 1"]


@SERIAL_OR_NOT
def test_a_handler_that_exits_does_not_take_the_private_loop_along(url: str, namespace: str, max_inflight: int) -> None:
    with running(topics.exiting, url, namespace, str(max_inflight)) as program:
        ended = program.end()
    assert ended.lines == ["told 3" if max_inflight == 1 else "failed", "alive ['orders']"]
    assert ended.code == 0


# --- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("script", [topics.forking, topics.forking_handler, topics.spawning])
def test_other_processes_have_connections_and_leases_of_their_own(
    url: str, namespace: str, script: Callable[..., None]
) -> None:
    assert run(script, url, namespace) == ["fine"]


@SERIAL_OR_NOT
def test_a_program_that_leaves_everything_open_ends(url: str, namespace: str, max_inflight: int) -> None:
    assert run(topics.ending, url, namespace, str(max_inflight)) == ["leaving"]


def test_what_a_program_leaves_undone_at_its_end_has_not_failed(url: str, namespace: str) -> None:
    assert run(topics.ending_busily, url, namespace) == ["leaving"]
    with Broker.connect(url, namespace=namespace) as broker:
        assert broker.admin.dead_letters("orders") == []
        assert {entry.failures for entry in broker.admin.pending("orders", "g").entries} <= {0}
