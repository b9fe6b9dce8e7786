-- Make claimable what has waited for its time, the longest due first.
-- $1 queue, $2 offset_ms, $3 at most so many
WITH moment AS MATERIALIZED (SELECT {moment} + $2::bigint AS now),
ripe AS MATERIALIZED (
    SELECT queue, id FROM {schema}.jobs
    WHERE queue = $1::text AND state = 'ready' AND NOT due AND ready_ms <= (SELECT now FROM moment)
    ORDER BY ready_ms
    LIMIT $3::bigint
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE {schema}.jobs j SET due = true FROM ripe WHERE j.queue = ripe.queue AND j.id = ripe.id
