"""Training speed at Kimi-K2.5's drafter shape on one GPU: speculators' own defaults and ours, side by side in one run.

    python benchmarks/training.py --result benchmarks/results/training.json

Random weights and data; every variant takes the same batches, whose rows of 1,444 tokens (the reference job's mean)
have a tenth of prompt.  A step is what speculators' Trainer does: autocast forward, backward, clipping, AdamW.
"trained" rows train the output head as the reference job did, "frozen" ones leave it to the verifier's rows as
speculators 0.9.0 does.

speculators' fused loss does not trace inside torch.compile on torch before 2.12: it is kept out of the trace there,
which costs nothing measurable and keeps its own kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slipstream import atomic

HIDDEN, VOCABULARY, DRAFT, AUX, TTT = 7168, 163840, 32000, 3, 3
ROW, PROMPT = 1444, 144
STEPS, WARM_UP = 50, 4
LEARNING_RATE = 3e-5
# variant -> (whose pass, packed tokens, head)
VARIANTS = {
    f"{who}-{head}-{tokens}": (who, tokens, head)
    for head, lengths in (("frozen", (2048, 8192)), ("trained", (8192,)))
    for who in ("speculators", "ours-bf16", "ours-fp8")
    for tokens in lengths
}


def model() -> Any:
    """The published Llama-type drafter with random weights on the GPU, in float32."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=18432,
        num_hidden_layers=1,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
    )
    layer._attn_implementation = "simple_flex_attention"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT,
        eagle_aux_hidden_state_layer_ids=[2, 30, 58],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=TTT)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    with torch.device("cuda"):
        made = Eagle3DraftModel(config).float()
    seeded = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.02, generator=seeded)
        made.verifier_lm_head.weight.copy_(made.lm_head.weight)
    return made


def batches(tokens: int) -> list[dict[str, torch.Tensor]]:
    """Four batches that training goes round."""
    made = []
    for seed in range(4):
        seeded = torch.Generator("cuda").manual_seed(seed)
        place = torch.arange(tokens, device="cuda")

        def states(width: int, source: torch.Generator = seeded) -> torch.Tensor:
            return torch.randn(1, tokens, width, device="cuda", dtype=torch.bfloat16, generator=source)

        made.append(
            {
                "hidden_states": states(AUX * HIDDEN),
                "input_ids": torch.randint(0, DRAFT, (1, tokens), device="cuda", generator=seeded),
                "document_ids": (place // ROW)[None],
                "loss_mask": (place % ROW >= PROMPT)[None],
                "position_ids": (1 + place % ROW)[None],
                "verifier_last_hidden_states": states(HIDDEN),
            }
        )
    return made


def work_per_token(trained_head: bool) -> float:
    """Multiply-adds' FLOPs of a token: forward, gradients of inputs and of weights; attention's scores are left out."""
    fc, layer = AUX * HIDDEN * HIDDEN, 2 * HIDDEN * 3 * 8192 + 8192 * HIDDEN + 3 * HIDDEN * 18432
    head = DRAFT * HIDDEN
    passes = fc * 2 + TTT * layer * 3 + TTT * head * (3 if trained_head else 2) + head
    return 2.0 * passes


def ceiling() -> float:
    """bf16 FLOP/s of an 8192-cubed product on random data, after a warm-up."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def run(times: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            left @ right
        torch.cuda.synchronize()
        return times * 2 * 8192**3 / (time.perf_counter() - started)

    run(20)
    return run(100)


def measure(made: Any, who: str, tokens: int, losses: Any) -> dict[str, Any]:
    """Speed over `STEPS` steps, peak memory, and the loss of the step after them."""
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig

    from slipstream.drafter import compute

    build: Callable[..., Any] = build_optimizers if who == "speculators" else compute.optimizers
    (optimizer,) = build(made, TrainerConfig(lr=LEARNING_RATE, num_epochs=1, save_path=""))
    given = batches(tokens)

    def step(number: int) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            _, loss, _ = made(**given[number % len(given)], ttt_steps=TTT, ttt_step_loss_decay=1.0, loss_config=losses)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    began = time.perf_counter()
    first = step(0).item()
    for number in range(1, WARM_UP):
        step(number)
    torch.cuda.synchronize()
    warm = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for number in range(WARM_UP, STEPS):
        last = step(number)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return {
        "tokens_per_second": round(tokens * (STEPS - WARM_UP) / seconds),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "loss_first_step": round(first, 5),
        "loss_after_50_steps": round(last.item(), 5),
        "warm_up_s": round(warm, 1),
    }


def run(name: str, bound: float) -> dict[str, Any]:
    """One variant from fresh weights."""
    from speculators.losses import resolve_loss_config

    from slipstream.drafter import ttt

    who, tokens, head = VARIANTS[name]
    made = model()
    made.lm_head.weight.requires_grad_(head == "trained")
    if who != "speculators":
        ttt.install(made, fp8=who == "ours-fp8")
    row = measure(made, who, tokens, resolve_loss_config("kl_div", "fused"))
    share = row["tokens_per_second"] * work_per_token(head == "trained") / bound
    return {"variant": name, "packed_tokens": tokens, "head": head, **row, "share_of_bf16_ceiling": round(share, 3)}


def over_best_default(rows: list[dict[str, Any]]) -> float | None:
    """The fastest of ours over speculators' faster default, at that one's packed length and with its frozen head."""
    frozen = [row for row in rows if row["head"] == "frozen"]
    defaults = [row for row in frozen if row["variant"].startswith("speculators")]
    if not defaults:
        return None
    best = max(defaults, key=lambda row: row["tokens_per_second"])
    peers = [row for row in frozen if row["variant"].startswith("ours")]
    ours = [row["tokens_per_second"] for row in peers if row["packed_tokens"] == best["packed_tokens"]]
    return round(max(ours) / best["tokens_per_second"], 3) if ours else None


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Each of ours over speculators' default at the same packed length and head."""
    speed = {row["variant"]: row["tokens_per_second"] for row in rows}
    found = {}
    for name, value in speed.items():
        peer = f"speculators-{name.split('-', 2)[2]}" if name.startswith("ours") else ""
        if peer in speed:
            found[name] = round(value / speed[peer], 3)
    return found


def main() -> None:
    """Runs the variants and writes the result after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    wanted = parser.parse_args()
    import speculators.losses.utils as losses

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        fused = losses._FUSED_LOSS_FN_MAP
        fused["kl_div"] = torch.compiler.disable(fused["kl_div"])
    bound = ceiling()
    result: dict[str, Any] = {
        "command": "python benchmarks/training.py --result benchmarks/results/training.json",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bf16_ceiling_tflops": round(bound / 1e12, 1),
        "rows": [],
    }
    for name in wanted.variants:
        result["rows"].append(run(name, bound))
        result["over_speculators_best_default"] = over_best_default(result["rows"])
        result["over_speculators_at_the_same_length"] = ratios(result["rows"])
        atomic.write_json(wanted.result, result)
        print(json.dumps(result["rows"][-1]), file=sys.stderr, flush=True)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(result["over_speculators_at_the_same_length"]))


if __name__ == "__main__":
    main()
