-- The jobs that certain claims have leased, for a caller that did not get their answers: ID, token, ID of the claim.
-- $1 queue, $2 offset_ms, $3 how many milliseconds these leases still have at least, $4 IDs of the claims
WITH since AS MATERIALIZED (SELECT {moment} + $2::bigint + $3::bigint AS ms)
SELECT id, token, claim_id FROM {schema}.jobs
WHERE queue = $1::text AND state = 'in_flight' AND lease_ms >= (SELECT ms FROM since)
    AND claim_id = ANY ($4::text[])
ORDER BY lease_ms, id
