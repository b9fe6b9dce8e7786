"""Consuming: a member of a group, the partitions that it owns, and its handlers."""
