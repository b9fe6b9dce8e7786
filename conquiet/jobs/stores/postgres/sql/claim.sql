-- Lease jobs to a worker: first some that were tried before, then some that have waited longest, then the rest.
-- One row a job, at least one. The first columns are in how many milliseconds a lease runs out that others hold, or
-- something falls due that waits (if that is past, nothing is leased, unless $8: expire and promote must come first); the
-- time; how many milliseconds the look took; whether others were told; and whether the job is of the rest.
-- $1 queue, $2 offset_ms, $3 worker, $4 ttl_ms, $5 count, $6 retries, $7 oldest, $8 in any case, $9 the claim's own ID,
-- $10 how many bytes of payloads at most, but for the last of them, $11 the channel, if others are to be told which jobs
-- are taken, or null
--
-- A token is higher than the job's last one, than that of any job that was removed from the queue, and at least the
-- time: so it rises even if the last one is lost with the server's last writes.
WITH moment AS MATERIALIZED (SELECT {moment} + $2::bigint AS now),
next AS MATERIALIZED (
    SELECT least(
        (
            SELECT ready_ms FROM {schema}.jobs
            WHERE queue = $1::text AND state = 'ready' AND NOT due ORDER BY ready_ms LIMIT 1
        ),
        (
            SELECT lease_ms FROM {schema}.jobs
            WHERE queue = $1::text AND state = 'in_flight' ORDER BY lease_ms LIMIT 1
        )
    ) - (SELECT now FROM moment) AS ms
),
may AS MATERIALIZED (SELECT CASE WHEN $8::boolean OR ms > 0 OR ms IS NULL THEN 1 ELSE 0 END AS claim FROM next),
again AS MATERIALIZED (
    SELECT queue, id, number, octet_length(payload) AS size FROM {schema}.jobs
    WHERE queue = $1::text AND state = 'ready' AND due AND attempts > 0
    ORDER BY priority DESC, ready_ms, number
    LIMIT $6::bigint * (SELECT claim FROM may)
    FOR NO KEY UPDATE SKIP LOCKED
),
oldest AS MATERIALIZED (
    SELECT queue, id, number, octet_length(payload) AS size FROM {schema}.jobs
    WHERE queue = $1::text AND state = 'ready' AND due
        AND number <> ALL (ARRAY(SELECT number FROM again))
    ORDER BY ready_ms, priority DESC, number
    LIMIT $7::bigint * (SELECT claim FROM may)
    FOR NO KEY UPDATE SKIP LOCKED
),
rest AS MATERIALIZED (
    SELECT queue, id, octet_length(payload) AS size FROM {schema}.jobs
    WHERE queue = $1::text AND state = 'ready' AND due
        AND number <> ALL (ARRAY(SELECT number FROM again UNION ALL SELECT number FROM oldest))
    ORDER BY -priority, ready_ms, number
    LIMIT (SELECT claim FROM may)
        * greatest(0, $5::bigint - (SELECT count(*) FROM again) - (SELECT count(*) FROM oldest))
    FOR NO KEY UPDATE SKIP LOCKED
),
chosen AS MATERIALIZED (
    SELECT queue, id, is_rest, sum(size) OVER (ROWS UNBOUNDED PRECEDING) - size AS before FROM (
        SELECT queue, id, size, false AS is_rest FROM again
        UNION ALL SELECT queue, id, size, false FROM oldest
        UNION ALL SELECT queue, id, size, true FROM rest
    ) AS all_of_them
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
        claim_id = $9::text,
        claimed_ms = (SELECT now FROM moment),
        lease_ms = (SELECT now FROM moment) + $4::bigint
    FROM chosen
    WHERE j.queue = chosen.queue AND j.id = chosen.id AND chosen.before < $10::bigint
    RETURNING chosen.is_rest, {claimed_columns}
),
told AS (
    SELECT pg_notify($11::text, json_build_array($1::text, json_agg(id))::text) FROM claimed
    HAVING $11::text IS NOT NULL AND count(*) BETWEEN 1 AND 20 AND sum(octet_length(id)) < 1000
)
SELECT
    next.ms,
    moment.now,
    (extract(epoch FROM clock_timestamp() - statement_timestamp()) * 1000)::float8,
    (SELECT count(*) FROM told),
    claimed.*
FROM next CROSS JOIN moment LEFT JOIN claimed ON true
