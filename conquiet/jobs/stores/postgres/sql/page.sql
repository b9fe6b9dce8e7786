-- Jobs in a state, in the order of enqueueing, as long as they are no more than so many bytes; after the columns, how many
-- there were without regard to that.
-- $1 queue, $2 state, $3 after this number, $4 at most so many, $5 bytes, but for the last of them
WITH listed AS MATERIALIZED (
    SELECT queue, state, number, octet_length(payload) + coalesce(octet_length(result), 0) AS size FROM {schema}.jobs
    WHERE queue = $1::text AND state = $2::text AND number > $3::bigint
    ORDER BY number
    LIMIT $4::bigint
),
fitting AS MATERIALIZED (
    SELECT queue, state, number, sum(size) OVER (ROWS UNBOUNDED PRECEDING) - size AS before FROM listed
)
SELECT {columns}, (SELECT count(*) FROM listed)
FROM fitting f JOIN {schema}.jobs j ON j.state = f.state AND j.queue = f.queue AND j.number = f.number
WHERE f.before < $5::bigint
