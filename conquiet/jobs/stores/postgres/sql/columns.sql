j.id, j.number, j.payload, j.state, j.priority, j.attempts, j.token, j.max_retries, j.worker, j.last_error, j.result,
    j.failures::text, j.enqueued_ms, j.ready_ms, j.claimed_ms, coalesce(j.renewed_ms, j.lease_ms), j.finished_ms,
    coalesce(j.claim_id, '')
