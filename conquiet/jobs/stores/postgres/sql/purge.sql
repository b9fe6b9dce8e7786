-- Remove the oldest finished jobs of a state: those up to one that is over a number, and those over an age.
-- $1 queue, $2 offset_ms, $3 state, $4 when that one finished and $5 its ID or null, $6 how old in ms or null,
-- $7 at most so many
WITH bound AS MATERIALIZED (
    SELECT $4::bigint AS ms, $5::text AS id, {moment} + $2::bigint - $6::bigint AS age
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
    LIMIT $7::bigint
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
