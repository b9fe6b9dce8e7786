-- What a job is for: the name of the task, on whose behalf, and what came with it, a JSON object of strings.
ALTER TABLE {schema}.jobs
    ADD COLUMN task text COLLATE "C",
    ADD COLUMN key text COLLATE "C",
    ADD COLUMN headers bytea;
