"""The measurement that decides: a vLLM server with the drafter and one without, on held-out prompts."""
