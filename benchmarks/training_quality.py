"""Whether lower precision trains the same drafter: accepted lengths after fine-tuning the pocket drafter at lr 3e-5.

    PYTHONPATH=. python benchmarks/training_quality.py --result benchmarks/results/training_quality.json

For every seed one drafter is trained in float32 for an epoch at lr 2e-3; from it each variant goes on at lr 3e-5, the
reference job's: float32 compute, bfloat16 and float8 compute over float32 weights (drafter.compute_dtype, fp8_linears),
and, to show that the measure sees vanishing updates, weights and moments in bfloat16.  The accepted length is the
offline replay's on traces that nothing was trained on, with the weights in float32.  States are transformers' of the
pocket verifier, traces the curriculum's.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from slipstream import atomic, vocabulary
from slipstream.acceptance.replay import replay
from slipstream.config import load_config
from slipstream.drafter import build, compute, ttt
from slipstream.drafter.job import Job
from slipstream.features.recipe import PRE_NORM
from slipstream.pocket import curriculum, traces
from slipstream.pocket.model import load_text_model

ROOT = Path(__file__).parents[1]
POCKET = ROOT / "slipstream" / "pocket" / "verifier"
LAYERS, HIDDEN, VOCABULARY, PACKED = [2, 3, 5], 128, 512, 512
SEEDS = (0, 1, 2)
VARIANTS = ("float32", "bf16", "fp8", "bf16-weights")
Batch = dict[str, torch.Tensor]


def samples(count: int, held_out: bool, device: str) -> list[dict[str, torch.Tensor]]:
    """Traces with their states, shifted as speculators' `shift_batch` does."""
    model = load_text_model(POCKET).float().eval().to(device)
    final: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: final.append(args[0].detach()[0]))
    tokenizer = Tokenizer.from_file(str(POCKET / "tokenizer.json"))
    made = []
    for trace in traces.encode(tokenizer, list(islice(curriculum.stream(11, held_out=held_out), count))):
        ids = torch.tensor(trace.ids, device=device)
        with torch.no_grad():
            states = model(ids[None], output_hidden_states=True).hidden_states
        mask = torch.arange(len(ids), device=device) >= trace.prompt
        made.append(
            {
                "hidden_states": torch.cat([states[layer][0] for layer in LAYERS], dim=-1)[:-1],
                "verifier_last_hidden_states": final.pop()[1:],
                "input_ids": ids[1:],
                "loss_mask": mask[1:],
                "position_ids": torch.arange(1, len(ids), device=device),
            }
        )
    return made


def packed(rows: list[Batch], order: list[int]) -> Iterator[Batch]:
    """Batches of `PACKED` tokens, padded with document -1."""
    held: list[Batch] = []
    for number in [*order, -1]:
        room = PACKED - sum(len(row["input_ids"]) for row in held)
        if number >= 0 and len(rows[number]["input_ids"]) <= room:
            held.append(rows[number])
            continue
        documents = torch.cat([torch.full_like(row["input_ids"], place) for place, row in enumerate(held)])
        joined = {name: torch.cat([row[name] for row in held]) for name in held[0]} | {"document_ids": documents}
        yield {
            name: torch.cat([value, value.new_full((room, *value.shape[1:]), -1 if name == "document_ids" else 0)])[
                None
            ]
            for name, value in joined.items()
        }
        held = [rows[number]] if number >= 0 else []


def drafter(seed: int, counts: np.ndarray, folder: Path, device: str) -> Any:
    """The pocket run's drafter, untrained."""
    words = folder / f"vocabulary-{seed}"
    words.mkdir()
    t2d, d2t = vocabulary.mappings(vocabulary.choose(counts, 320, []), VOCABULARY)
    np.save(words / "t2d.npy", t2d)
    np.save(words / "d2t.npy", d2t)
    given = load_config(ROOT / "deployments" / "pocket.yaml").drafter
    assert given.shape is not None
    empty = dict.fromkeys(("features", "checkpoints", "metrics"), "")
    numbers: dict[str, Any] = {"layer_ids": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCABULARY}
    numbers |= {"train_rows": 1, "rows": 2, "final_state": PRE_NORM, "shape": given.shape}
    config = given.model_copy(update={"seed": seed})
    job = Job(verifier=str(POCKET), vocabulary=str(words), drafter=config, **empty, **numbers)
    return build.build(job, "cpu").to(device)


def train(model: Any, rows: list[Batch], variant: str, rate: float, epochs: int, seed: int) -> None:
    """AdamW with a cosine to zero; speculators' order of a step."""
    from speculators.losses import resolve_loss_config
    from speculators.train.trainer import TrainerConfig

    device = rows[0]["input_ids"].device.type
    ttt.install(model, fp8=variant == "fp8")
    if variant == "bf16-weights":
        model.bfloat16()
    (optimizer,) = compute.optimizers(model, TrainerConfig(lr=rate, num_epochs=epochs, save_path=""))
    orders = [random.Random(seed * 1000 + epoch).sample(range(len(rows)), len(rows)) for epoch in range(epochs)]
    total = sum(1 for order in orders for _ in packed(rows, order))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    losses = resolve_loss_config("kl_div", "eager")
    for order in orders:
        for batch in packed(rows, order):
            with torch.autocast(device, dtype=torch.bfloat16, enabled=variant != "float32"):
                _, loss, _ = model(**batch, ttt_steps=3, loss_config=losses)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()


def accepted_length(model: Any, rows: list[Batch]) -> float:
    """By replay, three tokens a chain, in float32."""
    with torch.compiler.set_stance("force_eager"):
        return replay(copy.deepcopy(model).float(), packed(rows, list(range(len(rows)))), 3).accepted_length


def figures(lengths: dict[str, list[float]], device: str) -> dict[str, Any]:
    """What the seeds so far say."""
    means = {name: statistics.mean(values) for name, values in lengths.items() if values}
    reference = lengths["float32"]
    return {
        "command": "PYTHONPATH=. python benchmarks/training_quality.py --train 500 --result "
        "benchmarks/results/training_quality.json",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "learning_rate": 3e-5,
        "accepted_length": {name: [round(value, 4) for value in values] for name, values in lengths.items()},
        "mean": {name: round(value, 4) for name, value in means.items()},
        "over_float32": {name: round(value / means["float32"], 4) for name, value in means.items()},
        "noise": round(statistics.stdev(reference) / means["float32"], 4) if len(reference) > 1 else None,
    }


def main() -> None:
    """Trains, replays, writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--train", type=int, default=800, help="traces to train on")
    parser.add_argument("--validate", type=int, default=150, help="traces to replay")
    parser.add_argument("--epochs", type=int, default=4, help="epochs at lr 3e-5")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    wanted = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    rows, unseen = samples(wanted.train, False, device), samples(wanted.validate, True, device)
    supervised = torch.cat([row["input_ids"][row["loss_mask"]] for row in rows]).cpu().numpy()
    counts = np.bincount(supervised, minlength=VOCABULARY)
    lengths: dict[str, list[float]] = {"start": [], **{variant: [] for variant in wanted.variants}}
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            start = drafter(seed, counts, Path(folder), device)
            train(start, rows, "float32", 2e-3, 1, seed)
            lengths["start"].append(accepted_length(start, unseen))
            weights = copy.deepcopy(start.state_dict())
            for variant in wanted.variants:
                start.float().load_state_dict(weights)
                train(start, rows, variant, 3e-5, wanted.epochs, seed + 1)
                lengths[variant].append(accepted_length(start, unseen))
                print(seed, variant, lengths["start"][-1], lengths[variant][-1], file=sys.stderr, flush=True)
            atomic.write_json(wanted.result, figures(lengths, device))
    print(wanted.result.read_text())


if __name__ == "__main__":
    main()
