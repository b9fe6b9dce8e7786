-- Which claim a lease is by: no two claims have the same ID, also if the server lost the first one and gives its token
-- again. Null for what was claimed by a version that knew no such ID.
ALTER TABLE {schema}.jobs ADD COLUMN claim_id text COLLATE "C";

-- Until when a lease was extended, in no index: so an extension changes the row alone. lease_ms, by which leases that have
-- run out are found, follows when it is found to be past. Null unless the lease was extended.
ALTER TABLE {schema}.jobs ADD COLUMN renewed_ms bigint;

-- what may be claimed now, by who has waited longest
CREATE INDEX jobs_oldest ON {schema}.jobs (queue, ready_ms, priority DESC, number)
    WHERE state = 'ready' AND due;

-- what may be claimed now, in the order of claims; all of it ascends, so that a scan can begin after any job
CREATE INDEX jobs_line ON {schema}.jobs (queue, (-priority), ready_ms, number)
    WHERE state = 'ready' AND due;
DROP INDEX {schema}.jobs_due;
