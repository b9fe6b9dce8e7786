"""The names of a queue and the defaults of its reads."""

from __future__ import annotations

from dataclasses import dataclass

from conquiet.kit import rules

__all__ = ["QueueConfig"]


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """The stream, the group and the consumer's name in it, with the defaults of its reads.

    ``consumer_name`` must be unique among the processes that are alive: two of one name share a pending list.
    """

    stream_key: str
    consumer_group: str
    consumer_name: str
    block_ms: int = 5_000
    """How long a read waits for a message, unless it says otherwise."""
    max_read_count: int = 1
    """How many messages a read asks for, unless it says otherwise; ``QueueConsumer`` insists on 1."""
    claim_idle_ms: int = 60_000
    """The visibility timeout: ``claim_stale`` takes over a message that is idle for so long, by default."""

    def __post_init__(self) -> None:
        rules.text("stream_key", self.stream_key)
        rules.text("consumer_group", self.consumer_group)
        rules.text("consumer_name", self.consumer_name)
        rules.integer("block_ms", self.block_ms, least=1)
        rules.integer("max_read_count", self.max_read_count, least=1)
        rules.integer("claim_idle_ms", self.claim_idle_ms, least=0)
