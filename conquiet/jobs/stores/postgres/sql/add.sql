-- Add jobs in the given order; fails as a whole if an ID is taken. The notice has their IDs if they are few and due: then
-- not all who hear of them have to look.
-- $1 queue, $2 offset_ms, $3 channel, $4 ids, $5 payloads, $6 priorities, $7 delays, $8 limits of retries,
-- $9 how long to wait for a transaction that has one of the IDs and has not decided, or null for as long as it takes
WITH moment AS MATERIALIZED (
    SELECT
        {moment} + $2::bigint AS now,
        CASE WHEN $9::text IS NOT NULL THEN set_config('lock_timeout', $9::text, true) END
),
added AS (
    INSERT INTO {schema}.jobs (queue, id, payload, priority, max_retries, enqueued_ms, ready_ms, due)
    SELECT
        $1::text, g.id, g.payload, g.priority, g.max_retries,
        moment.now, moment.now + g.delay_ms, g.delay_ms <= 0
    FROM unnest($4::text[], $5::bytea[], $6::bigint[], $7::bigint[], $8::bigint[])
        WITH ORDINALITY AS g (id, payload, priority, delay_ms, max_retries, place), moment
    ORDER BY g.place
    RETURNING 1
)
SELECT pg_notify(
    $3::text,
    CASE
        WHEN cardinality($4::text[]) <= 20 AND octet_length(array_to_string($4::text[], '')) < 1000
            AND 0 >= ALL ($7::bigint[])
        THEN json_build_object($1::text, to_json($4::text[]))
        ELSE json_build_array($1::text)
    END::text
)
FROM (SELECT count(*) AS jobs FROM added) AS all_of_them
WHERE jobs > 0
