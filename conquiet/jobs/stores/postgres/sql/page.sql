-- Jobs in a state, in the order of enqueueing.
-- $1 queue, $2 state, $3 after this number, $4 at most so many
SELECT {columns}
FROM {schema}.jobs j
WHERE j.queue = $1::text AND j.state = $2::text AND j.number > $3::bigint
ORDER BY j.number
LIMIT $4::bigint
