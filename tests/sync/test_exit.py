"""Programs that end with everything open: at once, in silence, and with their own exit code."""

from __future__ import annotations

import psutil
import pytest

from conquiet.sync import QueueConfig
from tests.sync.looking import Eye, named, until
from tests.sync.programs import Ended, running
from tests.sync.scripts import exits

pytestmark = [pytest.mark.any_server, pytest.mark.slow]


def left(url: str, config: QueueConfig, what: str, how: str = "return") -> Ended:
    name, url = named(url)
    with running(exits.leave, url, name, config.stream_key, what, how) as program:
        return program.end()


@pytest.mark.parametrize("what", ["queue", "consumer", "generator", "cyclic generator", "local generator"])
def test_what_is_left_open_does_not_show(url: str, config: QueueConfig, what: str) -> None:
    assert left(url, config, what).went_well() == ["leaving"]


@pytest.mark.parametrize("what", ["thread", "iterating thread"])
def test_a_daemon_thread_that_waits_does_not_show(url: str, config: QueueConfig, what: str) -> None:
    """As it would not with any other client: Python freezes such threads, and they report nothing."""
    assert left(url, config, what).went_well() == ["leaving"]


def test_a_clean_up_at_exit_can_still_call(url: str, config: QueueConfig) -> None:
    assert left(url, config, "at exit").went_well() == ["leaving", "written True None"]


def test_a_thread_that_python_waits_for_can_still_call(url: str, config: QueueConfig) -> None:
    assert left(url, config, "worker").went_well() == ["leaving", "written True"]


@pytest.mark.parametrize("what", ["queue", "generator"])
def test_an_exit_code_is_kept(url: str, config: QueueConfig, what: str) -> None:
    assert left(url, config, what, "exit") == Ended(3, ["leaving"], "")
    assert left(url, config, what, "os._exit") == Ended(4, ["leaving"], "")


@pytest.mark.parametrize("what", ["queue", "generator"])
def test_only_the_programs_own_error_is_told(url: str, config: QueueConfig, what: str) -> None:
    ended = left(url, config, what, "error")
    assert (ended.code, ended.lines) == (1, ["leaving"])
    assert ended.errors.count("Traceback") == 1
    assert ended.errors.endswith("LookupError: of the program itself\n")
    assert "destroyed" not in ended.errors


def test_an_open_server_ends_with_its_program(url: str, config: QueueConfig) -> None:
    pid, leaving = left(url, config, "server").went_well()
    assert leaving == "leaving"
    until(lambda: not psutil.pid_exists(int(pid.removeprefix("pid "))), "the end of the server")


def test_the_connections_are_closed(url: str, eye: Eye, config: QueueConfig) -> None:
    name, url = named(url)
    with running(exits.leave, url, name, config.stream_key, "generator", "return") as program:
        program.end().went_well()
    until(lambda: eye.clients(name) == {}, "the end of its connections")
