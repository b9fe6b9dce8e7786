-- Apply what workers say became of their jobs; the places of those that were leased to them.
-- $1 queue, $2 offset_ms, $3 channel, $4 length of the history, $5 how many,
-- $6 ids in ascending order, $7 tokens, $8 IDs of the claims, $9 kinds, $10 delays, $11 errors, $12 briefs, $13 results
-- (Why leases are found in this way: see renew.)
WITH moment AS MATERIALIZED (SELECT {moment} + $2::bigint AS now),
settled AS (
    UPDATE {schema}.jobs j SET
        state = CASE g.kind WHEN 'ack' THEN 'succeeded' WHEN 'fail' THEN 'failed' ELSE 'ready' END,
        due = g.kind <> 'retry' OR g.delay_ms <= 0,
        attempts = CASE g.kind WHEN 'release' THEN j.attempts - 1 ELSE j.attempts END,
        ready_ms = CASE g.kind WHEN 'retry' THEN (SELECT now FROM moment) + g.delay_ms ELSE j.ready_ms END,
        finished_ms = CASE WHEN g.kind IN ('ack', 'fail') THEN (SELECT now FROM moment) END,
        claimed_ms = CASE g.kind WHEN 'release' THEN NULL ELSE j.claimed_ms END,
        worker = CASE g.kind WHEN 'release' THEN NULL ELSE j.worker END,
        lease_ms = NULL,
        renewed_ms = NULL,
        result = CASE g.kind WHEN 'ack' THEN g.result ELSE j.result END,
        last_error = CASE WHEN g.kind IN ('retry', 'fail') THEN g.error ELSE j.last_error END,
        failures = CASE
            WHEN g.kind IN ('ack', 'release') THEN j.failures
            WHEN jsonb_array_length(j.failures) >= $4::integer THEN j.failures - 0
            ELSE coalesce(j.failures, '[]')
        END || CASE
            WHEN g.kind IN ('ack', 'release') THEN '[]'
            ELSE jsonb_build_array(
                jsonb_build_array(j.attempts, coalesce(j.worker, ''), j.claimed_ms, (SELECT now FROM moment), g.brief)
            )
        END
    FROM (
        SELECT $1::text AS queue, id, token, claim_id, kind, delay_ms, error, brief, result, place
        FROM unnest(
            $6::text[], $7::bigint[], $8::text[], $9::text[], $10::bigint[], $11::text[], $12::text[], $13::bytea[]
        ) WITH ORDINALITY AS given (id, token, claim_id, kind, delay_ms, error, brief, result, place)
        LIMIT $5::bigint
    ) AS g
    WHERE j.queue = g.queue AND j.id = g.id AND j.token = g.token
        AND coalesce(j.claim_id, '') = g.claim_id AND j.lease_ms IS NOT NULL
    RETURNING g.place, j.queue, j.id, j.state, j.due, j.watched
),
told AS (
    SELECT
        CASE
            WHEN bool_and(due) AND count(*) <= 20 AND sum(octet_length(id)) < 1000
            THEN json_build_object($1::text, json_agg(id))
            ELSE json_build_array($1::text)
        END AS what
    FROM settled WHERE state = 'ready' HAVING count(*) > 0
    UNION ALL
    SELECT json_build_array(queue, id) FROM settled WHERE state <> 'ready' AND watched
)
SELECT place, (SELECT count(pg_notify($3::text, what::text)) FROM told) FROM settled
