-- Remove a finished job.
-- $1 queue, $2 id
-- (That it is finished is asked in a way for which the planner knows no index but the key.)
WITH deleted AS (
    DELETE FROM {schema}.jobs j
    WHERE j.queue = $1::text AND j.id = $2::text AND j.state NOT IN ('ready', 'in_flight')
    RETURNING {columns}
),
noted AS (
    INSERT INTO {schema}.queues AS q (queue, token) SELECT $1::text, token FROM deleted WHERE token > 0
    ON CONFLICT (queue) DO UPDATE SET token = excluded.token WHERE q.token < excluded.token
)
SELECT * FROM deleted
