"""Jobs in a PostgreSQL database."""

from __future__ import annotations

from conquiet.jobs.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
