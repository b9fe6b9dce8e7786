-- The processes of the server that listen by a statement of this text, in no order.
-- $1 the statement
SELECT pid::bigint FROM pg_stat_activity WHERE datname = current_database() AND query = $1::text
