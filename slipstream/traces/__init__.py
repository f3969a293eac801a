"""Prompts in, token-exact traces out."""
