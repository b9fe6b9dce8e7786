-- One table for the jobs of all queues. A job's row changes at each step of its life, so every index but two is
-- partial: it holds only rows of the state that it serves, and finished jobs, however many, are in none of the
-- indexes that a claim reads.
CREATE TABLE {schema}.jobs (
    queue text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    -- the order of enqueueing
    number bigint GENERATED ALWAYS AS IDENTITY,
    state text COLLATE "C" NOT NULL DEFAULT 'ready',
    -- Of a job that is ready: whether its time has come. False until a claim finds that it has, so that the index
    -- which claims read holds nothing that cannot be claimed.
    due boolean NOT NULL,
    -- whether somebody waits for its end and is to be notified
    watched boolean NOT NULL DEFAULT false,
    priority bigint NOT NULL,
    attempts integer NOT NULL DEFAULT 0,
    token bigint NOT NULL DEFAULT 0,
    max_retries bigint,
    enqueued_ms bigint NOT NULL,
    ready_ms bigint NOT NULL,
    claimed_ms bigint,
    lease_ms bigint,
    finished_ms bigint,
    worker text,
    last_error text,
    -- JSON as it was given, not jsonb: that would change it, and refuses what a payload may hold
    payload bytea NOT NULL,
    result bytea,
    -- [[attempt, worker, started_ms, ended_ms, error], ...]; null if there are none
    failures jsonb,
    CONSTRAINT jobs_key PRIMARY KEY (queue, id),
    CONSTRAINT jobs_state CHECK (state IN ('ready', 'in_flight', 'succeeded', 'failed')),
    CONSTRAINT jobs_lease CHECK ((state = 'in_flight') = (lease_ms IS NOT NULL)),
    CONSTRAINT jobs_end CHECK ((state IN ('succeeded', 'failed')) = (finished_ms IS NOT NULL))
) WITH (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_analyze_threshold = 1000,
    autovacuum_vacuum_cost_delay = 1
);

-- what may be claimed now, in the order of claims
CREATE INDEX jobs_due ON {schema}.jobs (queue, priority DESC, ready_ms, number)
    WHERE state = 'ready' AND due;

-- the same, of jobs that were tried before
CREATE INDEX jobs_again ON {schema}.jobs (queue, priority DESC, ready_ms, number)
    WHERE state = 'ready' AND due AND attempts > 0;

-- what waits for its time
CREATE INDEX jobs_waiting ON {schema}.jobs (queue, ready_ms)
    WHERE state = 'ready' AND NOT due;

-- leases by the moment at which they run out
CREATE INDEX jobs_leased ON {schema}.jobs (queue, lease_ms)
    WHERE state = 'in_flight';

-- The last two begin with the state: by the queue alone, which each statement names, they would be taken for a good way
-- to a single job while there are few.

-- what is finished, for purging the oldest
CREATE INDEX jobs_finished ON {schema}.jobs (state, queue, finished_ms, id)
    WHERE finished_ms IS NOT NULL;

-- for counting and paging
CREATE INDEX jobs_by_state ON {schema}.jobs (state, queue, number);

-- What must outlive the jobs of a queue: the highest token of any that was removed, so that an ID which is used again
-- does not bring the leases of its former job back.
CREATE TABLE {schema}.queues (
    queue text COLLATE "C" PRIMARY KEY,
    token bigint NOT NULL
);

-- Fails if a job was removed since a statement began that adds jobs with this token. (A statement sees one moment, the
-- queries of a function their own.)
CREATE FUNCTION {schema}.still_begins(name text, begun bigint) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.queues WHERE queue = name AND token > begun) THEN
        RAISE EXCEPTION 'jobs were removed from the queue meanwhile' USING ERRCODE = 'serialization_failure';
    END IF;
END
$$;
