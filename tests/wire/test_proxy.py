"""The proxy of the tests leaves nothing open, also of a client that connects while it closes."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings

import pytest

from tests.rigs.proxy import Proxy


@pytest.mark.parametrize("turns", range(5))
def test_a_connection_that_is_accepted_at_the_end_is_closed(url: str, turns: int) -> None:
    async def connect_and_leave() -> None:
        async with Proxy(url) as proxy:
            client = socket.create_connection(("127.0.0.1", proxy.port))
            for _ in range(turns):
                await asyncio.sleep(0)
        client.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        asyncio.run(connect_and_leave())
        gc.collect()
    assert [str(one.message) for one in caught if issubclass(one.category, ResourceWarning)] == []
