"""Real servers in the shapes that tests need: a Cluster, Sentinels, and a proxy that makes trouble."""

from __future__ import annotations
