-- Note how far jobs are; the places of those that are leased to the caller.
-- $1 queue, $2 ids in ascending order, $3 tokens, $4 IDs of the claims, $5 how far, in millionths, $6 words, $7 how many
-- (Why leases are found in this way: see renew.)
UPDATE {schema}.jobs j SET fraction = g.millionths / 1000000.0, message = g.words
FROM (
    SELECT $1::text AS queue, id, token, claim_id, millionths, words, place
    FROM unnest($2::text[], $3::bigint[], $4::text[], $5::bigint[], $6::text[])
        WITH ORDINALITY AS given (id, token, claim_id, millionths, words, place)
    LIMIT $7::bigint
) AS g
WHERE j.queue = g.queue AND j.id = g.id AND j.token = g.token
    AND coalesce(j.claim_id, '') = g.claim_id AND j.lease_ms IS NOT NULL
RETURNING g.place
