-- Give up leases that have run out, the oldest first; where one was extended, note until when.
-- $1 queue, $2 offset_ms, $3 channel, $4 max_retries, $5 at most so many, $6 error, $7 length of the history
WITH moment AS MATERIALIZED (SELECT {moment} + $2::bigint AS now),
late AS MATERIALIZED (
    SELECT queue, id, coalesce(renewed_ms, lease_ms) AS until_ms FROM {schema}.jobs
    WHERE queue = $1::text AND state = 'in_flight' AND lease_ms <= (SELECT now FROM moment)
    ORDER BY lease_ms
    LIMIT $5::bigint
    FOR NO KEY UPDATE SKIP LOCKED
),
followed AS (
    UPDATE {schema}.jobs j SET lease_ms = late.until_ms
    FROM late
    WHERE j.queue = late.queue AND j.id = late.id AND late.until_ms > (SELECT now FROM moment)
),
expired AS (
    UPDATE {schema}.jobs j SET
        state = CASE WHEN j.attempts > coalesce(j.max_retries, $4::bigint) THEN 'failed' ELSE 'ready' END,
        finished_ms = CASE WHEN j.attempts > coalesce(j.max_retries, $4::bigint) THEN (SELECT now FROM moment) END,
        ready_ms = CASE WHEN j.attempts > coalesce(j.max_retries, $4::bigint) THEN j.ready_ms ELSE late.until_ms END,
        due = true,
        lease_ms = NULL,
        renewed_ms = NULL,
        last_error = $6::text,
        failures = CASE
            WHEN jsonb_array_length(j.failures) >= $7::integer THEN j.failures - 0
            ELSE coalesce(j.failures, '[]')
        END || jsonb_build_array(
            jsonb_build_array(j.attempts, coalesce(j.worker, ''), j.claimed_ms, late.until_ms, $6::text)
        )
    FROM late
    WHERE j.queue = late.queue AND j.id = late.id AND late.until_ms <= (SELECT now FROM moment)
    RETURNING j.queue, j.id, j.state, j.watched, late.until_ms
),
told AS (
    SELECT json_build_array($1::text) AS what
    UNION ALL
    SELECT json_build_array(queue, id) FROM expired WHERE state = 'failed' AND watched
)
SELECT id, state, until_ms, (SELECT count(pg_notify($3::text, what::text)) FROM told) FROM expired
