-- Note a version as applied.
-- $1 version, $2 name
INSERT INTO {schema}.migrations (version, name) VALUES ($1, $2)
