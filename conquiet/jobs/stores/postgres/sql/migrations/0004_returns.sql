-- How often a job was given back at no cost after it was begun: put off by its handler, or because its worker ended.
ALTER TABLE {schema}.jobs
    ADD COLUMN snoozes integer NOT NULL DEFAULT 0,
    ADD COLUMN interruptions integer NOT NULL DEFAULT 0;
