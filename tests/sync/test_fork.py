"""Parents and children that share an object, and no connection.

Each scenario is a script, since a fork of the test runner itself would take all its threads' state along. What
they assert: the child gets its own replies, on its own connection; the parent's next commands do not hang (they
would, if the child closed an inherited connection: it shares the parent's epoll set) and get theirs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conquiet.sync import QueueConfig
from tests.sync.looking import Eye, named, until
from tests.sync.programs import run
from tests.sync.scripts import forks

pytestmark = [pytest.mark.any_server, pytest.mark.slow]


@pytest.mark.parametrize(
    "scenario", [getattr(forks, name) for name in forks.__all__], ids=lambda script: script.__name__
)
def test_fork(url: str, eye: Eye, config: QueueConfig, scenario: Callable[..., None]) -> None:
    name, named_url = named(url)
    assert run(scenario, named_url, name, url, config.stream_key) == ["fine"]
    until(lambda: eye.clients(name) == {}, "the end of all connections")
