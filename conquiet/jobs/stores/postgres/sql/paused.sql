-- Whether a queue is paused.
-- $1 queue
SELECT EXISTS (SELECT FROM {schema}.queues WHERE queue = $1::text AND paused)
