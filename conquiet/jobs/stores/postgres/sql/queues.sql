-- The names of all queues that have jobs, or had some that were claimed; one step of the index for each.
WITH RECURSIVE names AS (
    (SELECT queue FROM {schema}.jobs ORDER BY queue, id LIMIT 1)
    UNION ALL
    SELECT (SELECT j.queue FROM {schema}.jobs j WHERE j.queue > names.queue ORDER BY j.queue, j.id LIMIT 1)
    FROM names WHERE names.queue IS NOT NULL
)
SELECT queue FROM names WHERE queue IS NOT NULL
UNION SELECT queue FROM {schema}.queues
