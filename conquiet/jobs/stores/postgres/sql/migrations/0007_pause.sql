-- Whether nothing of a queue is to be claimed.
ALTER TABLE {schema}.queues ADD COLUMN paused boolean NOT NULL DEFAULT false;
