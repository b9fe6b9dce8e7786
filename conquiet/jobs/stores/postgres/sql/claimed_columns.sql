j.id, j.number, j.payload, j.priority, j.attempts, j.token, j.max_retries, j.last_error, j.failures::text, j.enqueued_ms,
    j.ready_ms,
    CASE
        WHEN num_nonnulls(j.task, j.key, j.headers, j.fraction) > 0 OR j.snoozes > 0 OR j.interruptions > 0
        THEN json_build_array(
            j.task, j.key, convert_from(j.headers, 'UTF8'), j.snoozes, j.interruptions, j.fraction, j.message
        )::text
    END
