-- How many jobs are in each state; then, as if they were states, how many are scheduled for later, and for how many
-- milliseconds the one that has waited longest is due.
-- $1 queue, $2 states, $3 offset_ms
WITH moment AS MATERIALIZED (SELECT {moment} + $3::bigint AS now)
SELECT s.state, (SELECT count(*) FROM {schema}.jobs j WHERE j.state = s.state AND j.queue = $1::text)
FROM unnest($2::text[]) AS s (state)
UNION ALL
SELECT 'scheduled', (
    SELECT count(*) FROM {schema}.jobs
    WHERE queue = $1::text AND state = 'ready' AND NOT due AND ready_ms > (SELECT now FROM moment)
)
UNION ALL
SELECT 'oldest', (SELECT now FROM moment) - least(
    (SELECT ready_ms FROM {schema}.jobs WHERE queue = $1::text AND state = 'ready' AND due ORDER BY ready_ms LIMIT 1),
    (
        SELECT ready_ms FROM {schema}.jobs
        WHERE queue = $1::text AND state = 'ready' AND NOT due AND ready_ms <= (SELECT now FROM moment)
        ORDER BY ready_ms LIMIT 1
    )
)
