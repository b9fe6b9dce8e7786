"""The one door for readers that are no members, such as Spark: they scan by IDs, and publish how far they are.

Beside this door, Spark uses :mod:`conquiet.topics.produce.once` to write, and nothing else of topics.
"""

from __future__ import annotations

from conquiet.topics.operate.replay import replay
from conquiet.topics.outside.scan import End, ends, last_up_to, pages, removed_after
from conquiet.topics.server.dead_letters import DeadLetter
from conquiet.topics.server.dead_letters import pages as letter_pages
from conquiet.topics.server.external_groups import Position, adopt_group, publish_progress
from conquiet.topics.server.group import count_after
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry, Topic

__all__ = [
    "DeadLetter",
    "End",
    "Instance",
    "Position",
    "Registry",
    "Topic",
    "adopt_group",
    "count_after",
    "ends",
    "last_up_to",
    "letter_pages",
    "pages",
    "publish_progress",
    "removed_after",
    "replay",
]
