-- Add jobs of which some have unique keys, as in add; the IDs of those that were added. One whose key another has taken
-- since it was asked for is left out; so is one that was to replace a job which does not wait any more.
-- $1 to $13 as in add; $14 unique keys, $15 modes, $16 lengths of windows, $17 the jobs to be replaced, $18 the versions
-- that the keys had when they were asked for, $19 the error of a replaced job
WITH moment AS MATERIALIZED (
    SELECT
        {moment} + $2::bigint AS now,
        CASE WHEN $9::text IS NOT NULL THEN set_config('lock_timeout', $9::text, true) END
),
given AS MATERIALIZED (
    SELECT * FROM unnest(
        $4::text[], $5::bytea[], $6::bigint[], $7::bigint[], $8::bigint[],
        $10::bigint[], $11::text[], $12::text[], $13::bytea[],
        $14::text[], $15::text[], $16::bigint[], $17::text[]
    ) WITH ORDINALITY AS g (
        id, payload, priority, delay_ms, max_retries, at_ms, task, key, headers,
        unique_key, mode, within_ms, replaces, place
    )
),
replaced AS (
    UPDATE {schema}.jobs j SET state = 'failed', finished_ms = (SELECT now FROM moment), last_error = $19::text
    FROM (SELECT $1::text AS queue, replaces FROM given WHERE replaces IS NOT NULL LIMIT 1000) AS g
    WHERE j.queue = g.queue AND j.id = g.replaces AND j.lease_ms IS NULL AND j.finished_ms IS NULL
    RETURNING j.id, j.watched
),
put AS (
    INSERT INTO {schema}.uniques AS u (queue, key, job_id, mode, until_ms)
    SELECT $1::text, unique_key, id, mode, CASE mode WHEN 'W' THEN (SELECT now FROM moment) + within_ms END
    FROM given
    WHERE unique_key IS NOT NULL AND (replaces IS NULL OR replaces IN (SELECT id FROM replaced))
    ORDER BY unique_key
    ON CONFLICT (queue, key) DO UPDATE
        SET job_id = excluded.job_id, mode = excluded.mode, until_ms = excluded.until_ms, version = DEFAULT
        WHERE u.version = ANY ($18::bigint[])
    RETURNING u.job_id
),
added AS (
    INSERT INTO {schema}.jobs
        (queue, id, payload, priority, max_retries, enqueued_ms, ready_ms, due, task, key, headers)
    SELECT
        $1::text, g.id, g.payload, g.priority, g.max_retries,
        moment.now, greatest(moment.now, coalesce(g.at_ms, moment.now + g.delay_ms)),
        coalesce(g.at_ms - moment.now, g.delay_ms) <= 0, g.task, g.key, g.headers
    FROM given g, moment
    WHERE g.unique_key IS NULL OR g.id IN (SELECT job_id FROM put)
    ORDER BY g.place
    RETURNING id
),
told AS (
    SELECT json_build_array($1::text) AS what FROM (SELECT count(*) AS jobs FROM added) AS all_of_them WHERE jobs > 0
    UNION ALL
    SELECT json_build_array($1::text, id) FROM replaced WHERE watched
)
SELECT id, (SELECT count(pg_notify($3::text, what::text)) FROM told) FROM added
