"""Topics: a partitioned log with groups, fenced leases, retry, dead letters and administration."""

from __future__ import annotations

from conquiet.topics.broker import Broker
from conquiet.topics.codec import BytesCodec, Codec, JsonCodec, TypedCodec
from conquiet.topics.consume.delivery import Delivery
from conquiet.topics.consume.subscription import Health, Messages, Subscription
from conquiet.topics.format.partitioner import ConsistentHashPartitioner, HashPartitioner, Partitioner
from conquiet.topics.operate.admin import Admin
from conquiet.topics.operate.inspect import GroupInfo, GroupPartition, TopicInfo
from conquiet.topics.operate.pending import PendingEntry, PendingPage
from conquiet.topics.options import DeadLetterPolicy, Retention, SubscribeOptions, TopicDefaults
from conquiet.topics.server.dead_letters import DeadLetter
from conquiet.topics.server.group import MemberInfo, PartitionInfo
from conquiet.topics.server.topics import LegacyTopic

__all__ = [
    "Admin",
    "Broker",
    "BytesCodec",
    "Codec",
    "ConsistentHashPartitioner",
    "DeadLetter",
    "DeadLetterPolicy",
    "Delivery",
    "GroupInfo",
    "GroupPartition",
    "HashPartitioner",
    "Health",
    "JsonCodec",
    "LegacyTopic",
    "MemberInfo",
    "Messages",
    "PartitionInfo",
    "Partitioner",
    "PendingEntry",
    "PendingPage",
    "Retention",
    "SubscribeOptions",
    "Subscription",
    "TopicDefaults",
    "TopicInfo",
    "TypedCodec",
]
