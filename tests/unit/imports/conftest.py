"""Stores made by hand: states of the pocket verifier, computed with transformers, written in both forms."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from slipstream.pocket.curriculum import stream
from slipstream.pocket.model import load_text_model
from slipstream.pocket.traces import encode
from tests.unit.conftest import POCKET

FINAL = 6  # the pocket verifier's layers
WANTED = [2, 3, 5, FINAL]


@dataclass(frozen=True)
class Made:
    """One row: token ids, mask, states float32 [tokens, 7, 128] by vLLM's id, the final state after the norm."""

    ids: list[int]
    mask: list[int]
    states: torch.Tensor
    normed: torch.Tensor

    def layers(
        self, layer_ids: Sequence[int], normed: bool = False, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """[tokens, len(layer_ids), 128], with `normed` the last one after the final norm."""
        states = self.states[:, list(layer_ids)].clone()
        if normed:
            states[:, -1] = self.normed
        return states.to(dtype)


@pytest.fixture(scope="session")
def rows() -> list[Made]:
    """Twelve tasks with the answers that the pocket verifier gives, and its states."""
    tokenizer = Tokenizer.from_file(str(POCKET / "tokenizer.json"))
    tasks = stream(7, held_out=False)
    model = load_text_model(POCKET)
    made: list[Made] = []
    for trace in encode(tokenizer, [next(tasks) for _ in range(12)]):
        held: list[torch.Tensor] = []

        def keep(module: Any, given: Any, output: Any, held: list[torch.Tensor] = held) -> None:
            held.append((output[0] if isinstance(output, tuple) else output).squeeze(0).detach())

        hooks = [module.register_forward_hook(keep) for module in (model.model.embed_tokens, *model.model.layers)]
        with torch.no_grad():
            normed = model.model(torch.tensor([trace.ids])).last_hidden_state[0]
        for hook in hooks:
            hook.remove()
        mask = [0] * trace.prompt + [1] * (len(trace.ids) - trace.prompt)
        made.append(Made(trace.ids, mask, torch.stack(held, dim=1), normed))
    return made


def write_v1(
    folder: Path,
    rows: Sequence[Made],
    layer_ids: Sequence[int] = WANTED,
    *,
    stacked: bool = False,
    normed: bool = False,
    dtype: torch.dtype = torch.float32,
    config: dict[str, Any] | None = None,
) -> Path:
    """A v1 folder of the states that vLLM calls `layer_ids`; its data_config.json names outputs, as v1 did."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(rows):
        states = row.layers(layer_ids, normed, dtype)
        held = states if stacked else [layer.contiguous() for layer in states.unbind(1)]
        sample = {"input_ids": torch.tensor(row.ids), "hidden_states": held, "loss_mask": torch.tensor(row.mask)}
        torch.save(sample, folder / f"data_{number}.pt")
    said = {
        "version": "2.0",
        "model": {"target_model_path": "org/pocket", "hidden_size": 128},
        "hidden_states": {"layer_ids": [layer - 1 for layer in layer_ids]},
    }
    (folder / "data_config.json").write_text(json.dumps(said | (config or {})))
    return folder


def write_current(
    folder: Path, rows: Sequence[Made], layer_ids: Sequence[int] = WANTED, dtype: torch.dtype = torch.float32
) -> Path:
    """A data set with hidden_states/hs_<row>.safetensors."""
    columns = {"input_ids": [row.ids for row in rows], "loss_mask": [row.mask for row in rows]}
    columns["seq_len"] = [len(row.ids) for row in rows]
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder))
    (folder / "hidden_states").mkdir()
    for number, row in enumerate(rows):
        held = {"hidden_states": row.layers(layer_ids, dtype=dtype), "token_ids": torch.tensor(row.ids)}
        save_file(held, folder / "hidden_states" / f"hs_{number}.safetensors")
    return folder


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    """Every file below a folder by name: what an import must leave as it is."""
    return lambda folder: {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
