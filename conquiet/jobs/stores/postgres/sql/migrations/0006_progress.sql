-- How far a job's handler says that it is, from 0 to 1, and in words.
ALTER TABLE {schema}.jobs
    ADD COLUMN fraction double precision,
    ADD COLUMN message text;
