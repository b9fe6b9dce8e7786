-- The jobs of these IDs, as far as there are any.
-- $1 queue, $2 ids, $3 how many
SELECT {columns}
FROM (SELECT $1::text AS queue, id FROM unnest($2::text[]) AS given (id) LIMIT $3::bigint) AS g
JOIN {schema}.jobs j ON j.queue = g.queue AND j.id = g.id
