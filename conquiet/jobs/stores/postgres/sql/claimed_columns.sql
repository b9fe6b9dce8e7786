j.id, j.number, j.payload, j.priority, j.attempts, j.token, j.max_retries, j.last_error, j.failures::text, j.enqueued_ms,
    j.ready_ms
