-- Lease jobs to a worker, of those that stand after a place in line: for a while after a claim that was dear.
-- One row a job. Nothing runs out or falls due by it, and no job has a share: that is left to the next claim.
-- $1 queue, $2 offset_ms, $3 worker, $4 ttl_ms, $5 count, $6 the claim's own ID, $7 how many bytes of payloads at most, but
-- for the last of them, $8 priority, negated, $9 ready_ms and $10 number of the place
WITH moment AS MATERIALIZED (SELECT {moment} + $2::bigint AS now),
rest AS MATERIALIZED (
    SELECT queue, id, octet_length(payload) AS size FROM {schema}.jobs
    WHERE queue = $1::text AND state = 'ready' AND due
        AND (-priority, ready_ms, number) > ($8::bigint, $9::bigint, $10::bigint)
    ORDER BY -priority, ready_ms, number
    LIMIT $5::bigint
    FOR NO KEY UPDATE SKIP LOCKED
),
chosen AS MATERIALIZED (
    SELECT queue, id, sum(size) OVER (ROWS UNBOUNDED PRECEDING) - size AS before FROM rest
),
base AS MATERIALIZED (
    SELECT greatest(now, (SELECT token + 1 FROM {schema}.queues WHERE queue = $1::text)) AS token FROM moment
),
claimed AS (
    UPDATE {schema}.jobs j SET
        state = 'in_flight',
        worker = $3::text,
        attempts = j.attempts + 1,
        token = greatest(j.token + 1, (SELECT token FROM base)),
        claim_id = $6::text,
        claimed_ms = (SELECT now FROM moment),
        lease_ms = (SELECT now FROM moment) + $4::bigint
    FROM chosen
    WHERE j.queue = chosen.queue AND j.id = chosen.id AND chosen.before < $7::bigint
    RETURNING {claimed_columns}
)
SELECT moment.now, claimed.* FROM moment LEFT JOIN claimed ON true
