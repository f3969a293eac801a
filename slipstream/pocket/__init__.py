"""The embedded default: a Kimi-K2.5-shaped verifier that runs on a laptop, and its curriculum.

`VERIFIER` is its directory. `prompts` writes prompts for it, `build` makes it anew.
"""

from pathlib import Path

VERIFIER = Path(__file__).parent / "verifier"
"""The committed verifier: config, bf16 weights, tokenizer."""
