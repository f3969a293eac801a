"""The untrained drafter: a speculators Eagle3 model of the configured shape with the verifier's frozen parts.

Embedding, head (the rows that `t2d` keeps) and final norm come from the verifier; `fc` and the decoder
layers are random or, with `init_from`, warm-started.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipstream import vocabulary
from slipstream.drafter import verifier_parts, warm_start, warm_start_check
from slipstream.drafter.job import Job
from slipstream.drafter.layer_config import layer_config
from slipstream.verifier import architectures


def drafter_config(job: Job, draft_vocab_size: int) -> Any:
    """speculators' `Eagle3SpeculatorConfig` of the job's drafter; what a checkpoint's config.json says."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    shape = job.shape
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(shape, job.hidden_size, job.vocab_size),
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=shape.norm_before_residual,
        norm_before_fc=shape.norm_before_fc,
        fc_norm=shape.fc_norm,
        norm_output=shape.norm_output,
        eagle_aux_hidden_state_layer_ids=job.layer_ids,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=job.drafter.ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=job.verifier, architectures=architectures(Path(job.verifier))),
        ),
    )


def empty(job: Job, draft_vocab_size: int, attention: str = "sdpa") -> Any:
    """An `Eagle3DraftModel` without the verifier's parts and mapping: those are NaN and zeros.

    Reads no weights, so that under `torch.device("meta")` any shape can be counted.  speculators' own
    `from_training_args` is not used: it asks transformers for the verifier's configuration, which fails on layouts of
    their own, and loads embedding, head and norm by the shortest name that ends alike (`drafter.verifier_parts`).
    """
    from speculators.models.eagle3 import Eagle3DraftModel

    config = drafter_config(job, draft_vocab_size)
    config.transformer_layer_config._attn_implementation = attention
    model = Eagle3DraftModel(config)
    model.lm_head.weight.requires_grad_(job.drafter.train_lm_head)
    return model


def build(job: Job, device: str) -> Any:
    """An `Eagle3DraftModel` in float32 on the CPU, seeded by `drafter.seed`, verifier weights loaded."""
    from speculators.train.distributed import get_rank

    torch.manual_seed(job.drafter.seed)
    t2d, d2t = (torch.from_numpy(array) for array in vocabulary.load(Path(job.vocabulary)))
    # flex attention has no backward pass on a CPU
    model = empty(job, len(d2t), "sdpa" if device == "cpu" else "simple_flex_attention").float()
    model.load_vocab_mappings(t2d, d2t)
    verifier_parts.load(model, Path(job.verifier), job.final_state)
    if job.drafter.init_from:
        folder = Path(job.drafter.init_from)
        checkpoint = warm_start_check.check(folder, job.shape, job.hidden_size, job.vocab_size, job.layer_ids)
        fates = warm_start.apply(model, checkpoint, t2d.numpy())
        if get_rank() == 0:
            warm_start.record(fates, Path(job.metrics).parent)
    return model
