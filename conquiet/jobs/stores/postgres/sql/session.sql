-- How the statements of the store are planned, on its own connections only. Each has exactly one good plan, by its
-- index; a plan that was made while the table was small and kept when it has grown must be that one too.
SELECT
    set_config('plan_cache_mode', 'force_generic_plan', false),
    set_config('enable_seqscan', 'off', false),
    set_config('enable_bitmapscan', 'off', false),
    set_config('enable_sort', 'off', false),
    set_config('enable_hashjoin', 'off', false),
    set_config('enable_mergejoin', 'off', false),
    set_config('jit', 'off', false),
    set_config('default_transaction_isolation', 'read committed', false)
