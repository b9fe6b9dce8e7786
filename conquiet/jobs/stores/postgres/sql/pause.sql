-- Pause a queue, so that nothing of it is claimed, or let it go on and tell all who wait.
-- $1 queue, $2 channel, $3 whether to pause
WITH noted AS (
    INSERT INTO {schema}.queues AS q (queue, token, paused) VALUES ($1::text, 0, $3::boolean)
    ON CONFLICT (queue) DO UPDATE SET paused = excluded.paused
    RETURNING paused
)
SELECT pg_notify($2::text, json_build_array($1::text)::text) FROM noted WHERE NOT paused
