-- Fail a job that is not finished; in flight, its token rises, so that its worker's is stale.
-- $1 queue, $2 offset_ms, $3 channel, $4 id, $5 error, $6 length of the history
WITH moment AS MATERIALIZED (SELECT {moment} + $2::bigint AS now),
cancelled AS (
    UPDATE {schema}.jobs j SET
        state = 'failed',
        finished_ms = (SELECT now FROM moment),
        token = CASE WHEN j.lease_ms IS NULL THEN j.token ELSE j.token + 1 END,
        last_error = $5::text,
        failures = CASE
            WHEN j.lease_ms IS NULL THEN j.failures
            WHEN jsonb_array_length(j.failures) >= $6::integer THEN j.failures - 0
            ELSE coalesce(j.failures, '[]')
        END || CASE
            WHEN j.lease_ms IS NULL THEN '[]'
            ELSE jsonb_build_array(
                jsonb_build_array(j.attempts, coalesce(j.worker, ''), j.claimed_ms, (SELECT now FROM moment), $5::text)
            )
        END,
        lease_ms = NULL,
        renewed_ms = NULL
    WHERE j.queue = $1::text AND j.id = $4::text AND j.finished_ms IS NULL
    RETURNING {columns}
)
SELECT cancelled.*, pg_notify($3::text, json_build_array($1::text, $4::text)::text) FROM cancelled
