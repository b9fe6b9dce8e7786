-- Make a failed job ready again.
-- $1 queue, $2 offset_ms, $3 channel, $4 id
-- (That it has failed is asked in a way for which the planner knows no index but the key.)
WITH replayed AS (
    UPDATE {schema}.jobs j SET
        state = 'ready', due = true, attempts = 0, ready_ms = {moment} + $2::bigint,
        finished_ms = NULL, worker = NULL, claimed_ms = NULL
    WHERE j.queue = $1::text AND j.id = $4::text AND j.state NOT IN ('ready', 'in_flight', 'succeeded')
    RETURNING {columns}
)
SELECT replayed.*, pg_notify($3::text, json_build_object($1::text, json_build_array($4::text))::text) FROM replayed
