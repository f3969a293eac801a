"""Hidden states of the traces: planned in shards, captured through vLLM, checked, stored for speculators."""
