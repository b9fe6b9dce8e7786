-- Ask for a notice when a job has ended.
-- $1 queue, $2 id, $3 channel
--
-- A claim that comes by at this moment passes over the job, because its row is locked: so the idle workers
-- are told to look again.
WITH watched AS (
    UPDATE {schema}.jobs SET watched = true
    WHERE queue = $1::text AND id = $2::text AND finished_ms IS NULL AND NOT watched
    RETURNING state
)
SELECT pg_notify($3::text, json_build_array($1::text)::text) FROM watched WHERE state = 'ready'
