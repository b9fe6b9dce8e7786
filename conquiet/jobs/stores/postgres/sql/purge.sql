-- Remove the oldest finished jobs of a state: those over a number, and those over an age.
-- $1 queue, $2 offset_ms, $3 state, $4 how many to keep or null, $5 how old in ms or null, $6 at most so many
WITH last AS MATERIALIZED (
    SELECT finished_ms, id FROM {schema}.jobs
    WHERE queue = $1::text AND state = $3::text AND finished_ms IS NOT NULL AND $4::bigint IS NOT NULL
    ORDER BY finished_ms DESC, id DESC
    OFFSET coalesce($4::bigint, 0)
    LIMIT 1
),
bound AS MATERIALIZED (
    SELECT
        (SELECT finished_ms FROM last) AS ms,
        (SELECT id FROM last) AS id,
        {moment} + $2::bigint - $5::bigint AS age
),
old AS MATERIALIZED (
    SELECT j.queue, j.id FROM {schema}.jobs j
    WHERE j.queue = $1::text AND j.state = $3::text
        AND j.finished_ms <= (SELECT greatest(ms, age) FROM bound)
        AND (
            (j.finished_ms, j.id) <= (SELECT ms, id FROM bound)
            OR j.finished_ms < (SELECT age FROM bound)
        )
    ORDER BY j.finished_ms, j.id
    LIMIT $6::bigint
    FOR UPDATE SKIP LOCKED
),
purged AS (
    DELETE FROM {schema}.jobs j USING old WHERE j.queue = old.queue AND j.id = old.id RETURNING j.token
),
noted AS (
    INSERT INTO {schema}.queues AS q (queue, token) SELECT $1::text, max(token) FROM purged HAVING max(token) > 0
    ON CONFLICT (queue) DO UPDATE SET token = excluded.token WHERE q.token < excluded.token
)
SELECT count(*) FROM purged
