-- Which claim a lease is by: no two claims have the same ID, also if the server lost the first one and gives its token
-- again. Null for what was claimed by a version that knew no such ID.
ALTER TABLE {schema}.jobs ADD COLUMN claim_id text COLLATE "C";
