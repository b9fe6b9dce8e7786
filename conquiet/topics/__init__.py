"""Topics: a partitioned log with groups, fenced leases, retry, dead letters and administration."""

from __future__ import annotations

from conquiet.topics.admin import Admin
from conquiet.topics.backlog import PendingEntry, PendingPage
from conquiet.topics.broker import Broker
from conquiet.topics.codec import BytesCodec, Codec, JsonCodec, TypedCodec
from conquiet.topics.deadletter import DeadLetter
from conquiet.topics.delivery import Delivery
from conquiet.topics.description import GroupInfo, GroupPartition, MemberInfo, PartitionInfo, TopicInfo
from conquiet.topics.options import DeadLetterPolicy, Retention, SubscribeOptions, TopicDefaults
from conquiet.topics.partitioner import ConsistentHashPartitioner, HashPartitioner, Partitioner
from conquiet.topics.registry import LegacyTopic
from conquiet.topics.subscription import Health, Messages, Subscription

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
