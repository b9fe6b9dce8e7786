"""Bringing a schema up to the version that the library knows."""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection, AsyncRawCursor

from conquiet.errors import ConfigError
from conquiet.jobs.stores.postgres import driver
from conquiet.jobs.stores.postgres.pool import Pool, Rows
from conquiet.jobs.stores.postgres.statements import Statements, migrations

__all__ = ["check", "migrate", "script"]


async def migrate(pool: Pool) -> int:
    """Apply the missing steps in one transaction, one process at a time; the version after it."""
    what = f"migrating schema {pool.schema!r}"
    connection = await pool.connect(what)
    try:
        async with connection.transaction():
            await _ask(connection, pool.statements["migrations_lock"], pool.schema)
            return await _apply(connection, pool)
    except driver.FAILURES as error:
        raise driver.refused(what, pool.schema, error) from error
    finally:
        await connection.close()


async def check(pool: Pool, *, is_new_fine: bool = False) -> None:
    """``ConfigError`` unless the schema has the version that the library knows, or may be brought up to it."""
    what = f"opening schema {pool.schema!r}"
    connection = await pool.connect(what)
    try:
        version = await _version(connection, pool)
    except driver.FAILURES as error:
        raise driver.refused(what, pool.schema, error) from error
    finally:
        await connection.close()
    known = migrations()[-1].version
    if is_new_fine and (version is None or version < known):
        return
    if version is None:
        raise ConfigError(f"there are no tables for jobs in schema {pool.schema!r}: run `await store.migrate()` once")
    if version < known:
        raise ConfigError(
            f"schema {pool.schema!r} has version {version}, this conquiet needs {known}: run `await store.migrate()`"
        )
    _refuse_newer(pool.schema, version)


def script(statements: Statements, since: int) -> str:
    """What :func:`migrate` does to a schema of version ``since``, as text."""
    parts = [] if since else [f"{_text(statements, 'schema_create')};\n\n{_text(statements, 'migrations_table')};\n"]
    for step in migrations():
        if step.version > since:
            note = statements.fill(
                f"INSERT INTO {{schema}}.migrations (version, name) VALUES ({step.version}, '{step.name}');\n"
            )
            parts += [statements.fill(step.text), note]
    return "\n".join(["BEGIN;\n", *parts, "COMMIT;\n"])


async def _apply(connection: AsyncConnection[Any], pool: Pool) -> int:
    statements, version = pool.statements, await _version(connection, pool)
    if version is None:
        [(has_schema, _)] = await _ask(connection, statements["schema_exists"], pool.schema)
        if not has_schema:
            await _ask(connection, statements["schema_create"])
        await _ask(connection, statements["migrations_table"])
    _refuse_newer(pool.schema, version or 0)
    for step in migrations():
        if step.version > (version or 0):
            await connection.execute(statements.fill(step.text).encode())
            await _ask(connection, statements["migrations_add"], step.version, step.name)
    return migrations()[-1].version


async def _version(connection: AsyncConnection[Any], pool: Pool) -> int | None:
    [(_, has_table)] = await _ask(connection, pool.statements["schema_exists"], pool.schema)
    if not has_table:
        return None
    [(version,)] = await _ask(connection, pool.statements["migrations_version"])
    return int(version) or None


async def _ask(connection: AsyncConnection[Any], statement: bytes, *values: object) -> Rows:
    cursor = await AsyncRawCursor(connection).execute(statement, values)
    return await cursor.fetchall() if cursor.description else []


def _refuse_newer(schema: str, version: int) -> None:
    known = migrations()[-1].version
    if version > known:
        raise ConfigError(
            f"schema {schema!r} has version {version}, made by a newer conquiet: this one knows {known} at most"
        )


def _text(statements: Statements, name: str) -> str:
    return statements[name].decode()
