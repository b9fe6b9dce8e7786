-- The newest version that was applied.
SELECT coalesce(max(version), 0) FROM {schema}.migrations
