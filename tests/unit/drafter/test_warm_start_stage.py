"""The stage starts from another drafter: in the training process, with its shape, under other tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from stub_server import StubServer

from slipstream import vocabulary
from slipstream.config import RunConfig
from slipstream.drafter import stage, warm_start, warm_start_check
from slipstream.progress import silent
from tests.unit.drafter import warm
from tests.unit.drafter.test_warm_start_check import SHAPE
from tests.unit.features.test_store import HIDDEN, Runner, rows_of

ROWS = rows_of(8)
TOKENS = [*range(40), 200, 205, *range(480, 500)]  # some that are said, some control tokens


@pytest.fixture
def run(tmp_path: Path, make_config: Callable[..., RunConfig]) -> Iterator[Runner]:
    """Traces and stores in the test's own work directory."""
    with StubServer(hidden=HIDDEN) as server:
        yield Runner(tmp_path / "work", server, make_config)


def test_the_stage_starts_from_a_published_drafter(run: Runner, tmp_path: Path) -> None:
    """Nothing of its shape is configured; no epoch is trained, so that what is exported is what it began with."""
    wide = {name: torch.randn(shape) for name, shape in warm_start_check.trained(SHAPE, HIDDEN, 3).items()}
    wide |= {"lm_head.weight": torch.randn(len(TOKENS), HIDDEN)} | warm.mapping(TOKENS, 512)
    says = warm.flat_config(hidden_size=HIDDEN, vocab_size=512, draft_vocab_size=len(TOKENS))
    given = warm.save(tmp_path / "published", warm.flat(wide), says)
    drafter = {"epochs": 0, "init_from": str(given), "shape": None, "threads": 1, "compute_dtype": "float32"}
    config = run.make(drafter=drafter, vocabulary={"size": 90})
    features, words = run(ROWS), vocabulary.run(run.root, config, run.traces(ROWS))
    made = stage.run(run.root, config, features, words, silent)
    before = load_file(given / "model.safetensors")
    after = load_file(stage.served_folder(made.folder, "initial") / "model.safetensors")
    assert after["midlayer.self_attn.q_proj.weight"].shape == (12, 256)
    for name in before.keys() - {"lm_head.weight", "d2t", "t2d"}:
        assert torch.equal(before[name].float(), after[name]), name
    mine = np.flatnonzero(after["t2d"].numpy()).tolist()
    assert 30 < len({*mine} & {*TOKENS}) < len(TOKENS)
    for token in {*mine} & {*TOKENS}:
        row = after["lm_head.weight"][mine.index(token)]
        assert torch.equal(row, before["lm_head.weight"][TOKENS.index(token)].float())
    table = {row["tensor"]: row["fate"] for row in json.loads((made.folder / warm_start.FILE).read_text())}
    assert (table["fc.weight"], table["lm_head.weight"], table["d2t"]) == ("taken", "remapped", "fresh")
    assert warm_start.FILE in made.manifest().files
    assert "warm start: fc.weight [128 x 384] taken" in (made.folder / "train.log").read_text()
