-- How many jobs are in each state.
-- $1 queue, $2 states
SELECT s.state, (SELECT count(*) FROM {schema}.jobs j WHERE j.state = s.state AND j.queue = $1::text)
FROM unnest($2::text[]) AS s (state)
