"""Prefect tasks: retries, cache key, artifacts and progress around one call into slipstream each."""
