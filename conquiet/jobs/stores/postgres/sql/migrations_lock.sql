-- Wait until no other process migrates this schema; ends with the transaction.
-- $1 schema
SELECT pg_advisory_xact_lock(hashtextextended('conquiet.migrate.' || $1, 0))
