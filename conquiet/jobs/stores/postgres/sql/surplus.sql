-- The newest finished job of a state that is over a number.
-- $1 queue, $2 state, $3 how many to keep
SELECT finished_ms, id FROM {schema}.jobs
WHERE queue = $1::text AND state = $2::text AND finished_ms IS NOT NULL
ORDER BY finished_ms DESC, id DESC
OFFSET $3::bigint
LIMIT 1
