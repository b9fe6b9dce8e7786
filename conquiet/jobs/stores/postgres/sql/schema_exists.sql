-- Whether the schema and its table of versions are there.
-- $1 schema
SELECT
    EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1),
    EXISTS (
        SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = $1 AND c.relname = 'migrations'
    )
