-- Extend leases; the places of those that were.
-- $1 queue, $2 offset_ms, $3 ttl_ms, $4 ids in ascending order, $5 tokens, $6 IDs of the claims, $7 how many
--
-- A job is leased if lease_ms is set; that it is in flight is not asked, lest the planner read all jobs in flight
-- rather than these. The limit keeps it from reading the table first and the arguments for each row.
--
-- lease_ms is left as it is, unless the lease is to end before it: else an index would have to follow each time.
UPDATE {schema}.jobs j SET
    renewed_ms = moment.now + $3::bigint,
    lease_ms = least(j.lease_ms, moment.now + $3::bigint)
FROM (SELECT {moment} + $2::bigint AS now) AS moment, (
    SELECT $1::text AS queue, id, token, claim_id, place
    FROM unnest($4::text[], $5::bigint[], $6::text[]) WITH ORDINALITY AS given (id, token, claim_id, place)
    LIMIT $7::bigint
) AS g
WHERE j.queue = g.queue AND j.id = g.id AND j.token = g.token
    AND coalesce(j.claim_id, '') = g.claim_id AND j.lease_ms IS NOT NULL
RETURNING g.place
