"""speculators' own trainer on our stores as they are: the folder is its format.

Its `main` needs three replacements to run without an accelerator (`slipstream.drafter.ranks.use_cpu`); nothing else
is changed: `speculators train`'s arguments go through its own parser.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stub_server import StubServer

from slipstream import vocabulary
from slipstream.config import RunConfig
from tests.conftest import ROOT
from tests.unit.features.test_store import HIDDEN, Runner, rows_of

ROWS = rows_of(12)
# speculators' CLI once for each list of arguments in argv[1], in one process
TRAIN = """
import json, sys
from slipstream.drafter.ranks import use_cpu
use_cpu()
import slipstream.features.backend
from speculators.train.cli import main
from speculators.train.config import TrainConfig
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    main(TrainConfig.resolve())
"""


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """A stub that writes states as wide as the pocket verifier's."""
    with StubServer(hidden=HIDDEN) as server:
        yield server


def test_it_trains_an_epoch_on_native_and_fp8_stores(
    tmp_path: Path, stub: StubServer, make_config: Callable[..., RunConfig]
) -> None:
    run = Runner(tmp_path / "work", stub, make_config)
    native = run(ROWS)
    stub.fp8 = True
    fp8 = run(ROWS, store="fp8")
    words = vocabulary.run(run.root, make_config(), run.traces(ROWS))
    common = f"""--speculator-type eagle3 --verifier-name-or-path {make_config().verifier.path}
        --d2t-path {words.folder}/d2t.npy --t2d-path {words.folder}/t2d.npy --target-layer-ids 2 3 5
        --draft-attn-impl sdpa --loss-implementation eager --mask-token-id 0 --hidden-states-dtype float32
        --epochs 1 --total-seq-len 32 --train-data-ratio 0.8 --num-workers 0 --on-missing raise"""
    trainings = [
        f"{common} --data-path {made.path} --hidden-states-backend {backend} --save-path {tmp_path / name}".split()
        for name, made, backend in (
            ("native", native, "file"),
            ("fp8", fp8, "fp8"),
            ("native-checked", native, "slipstream"),
            ("fp8-checked", fp8, "slipstream"),
        )
    ]
    command = [sys.executable, "-c", TRAIN, json.dumps(trainings)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = {
        path.name: json.loads((path / "0" / "val_metrics.json").read_text())["loss_epoch"]
        for path in tmp_path.iterdir()
        if (path / "0" / "model.safetensors").exists()
    }
    assert losses.keys() == {"native", "fp8", "native-checked", "fp8-checked"}
    assert all(math.isfinite(loss) for loss in losses.values())
    # one process after the other would draw the same weights; here they differ by the draws that came before
    assert losses["native-checked"] == pytest.approx(losses["native"], rel=1e-3)
    assert losses["fp8-checked"] == pytest.approx(losses["fp8"], rel=1e-3)
    assert losses["fp8"] == pytest.approx(losses["native"], rel=0.05)
