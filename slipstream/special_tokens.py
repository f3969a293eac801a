"""Control tokens: what the tokenizer's files declare, what loads from them, what the server makes of them.

A tokenizer whose special ids have gaps (Kimi: 163,840 ids, think tags at 163,606 and 163,607) loads in some
libraries with the specials packed contiguously.  Nothing fails then: masks, boundaries and the draft vocabulary are
wrong.  So the three are compared before anything is asked, and a difference aborts by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.chat import Refused, Server
from slipstream.errors import InputError
from slipstream.verifier import special_tokens


def refuse_differences(declared: Mapping[str, int], found: Mapping[str, Sequence[int]], who: str) -> None:
    """Raises InputError that lists every token whose ids in `found` are not exactly the declared one."""
    wrong = [
        f"{text} is {declared[text]} in the files and {_ids(ids)} {who}"
        for text, ids in found.items()
        if list(ids) != [declared[text]]
    ]
    if wrong:
        raise InputError(
            f"special tokens differ: {'; '.join(wrong)}; every mask and target would be wrong, so make the server and "
            "verifier.path use the same, intact tokenizer"
        )


def _ids(ids: Sequence[int]) -> str:
    return str(ids[0]) if len(ids) == 1 else (" + ".join(map(str, ids)) or "unknown")


def check_loaded(folder: Path) -> dict[str, int]:
    """The declared special tokens, after `tokenizer.json` (when there is one) has been loaded and agrees.

    What only `tokenizer_config.json` declares is added by whoever loads both, so it is not compared here.
    """
    declared = special_tokens(folder)
    path = folder / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        try:
            loaded = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise InputError(f"{path}: not a tokenizer that loads ({error})") from error
        found = {
            text: loaded.encode(text, add_special_tokens=False).ids
            for text in declared
            if loaded.token_to_id(text) is not None
        }
        refuse_differences(declared, found, f"when {path.name} is loaded")
    return declared


async def check_served(server: Server, declared: Mapping[str, int]) -> bool:
    """Compares with the server's tokenizer; False when the server has no /tokenize that takes text.

    One request for all tokens together; only when that differs is each asked for, to name the wrong ones.
    """
    try:
        together = await server.tokenize_text("".join(declared))
    except Refused:
        return False
    if not together:
        return False
    if together != list(declared.values()):
        found = {text: await server.tokenize_text(text) or [] for text in declared}
        refuse_differences(declared, found, f"on {server.endpoint.url}")
    return True
