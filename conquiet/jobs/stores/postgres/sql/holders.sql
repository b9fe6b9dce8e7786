-- Of unique keys: the job that has each, or had it last; whether it has it still, whether that job waits, and the version.
-- $1 queue, $2 offset_ms, $3 keys, $4 how many
WITH moment AS MATERIALIZED (SELECT {moment} + $2::bigint AS now)
SELECT
    u.key,
    u.job_id,
    CASE u.mode
        WHEN 'W' THEN u.until_ms > (SELECT now FROM moment)
        WHEN 'F' THEN coalesce(j.finished_ms IS NULL AND j.id IS NOT NULL, false)
        ELSE coalesce(j.state = 'ready' AND j.token = 0, false)
    END,
    coalesce(j.state = 'ready', false),
    u.version
FROM (SELECT $1::text AS queue, key FROM unnest($3::text[]) AS given (key) LIMIT $4::bigint) AS g
JOIN {schema}.uniques u ON u.queue = g.queue AND u.key = g.key
LEFT JOIN {schema}.jobs j ON j.queue = u.queue AND j.id = u.job_id
