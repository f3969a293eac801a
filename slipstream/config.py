"""The run configuration: one frozen pydantic model a stage, gathered in `RunConfig`.

`RunConfig` is the training flow's only parameter, so Prefect draws it as a form: descriptions carry
units, constraints sit on the fields, unknown keys are refused.  Relative paths are taken from the
directory in which the run is started (the repository's root for the deployments that ship here).

A stage's key holds only what can change what comes out.  Each model names the fields that cannot
in `RUNTIME`; `recipe()` leaves them out.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from slipstream.errors import InputError

Dtype = Literal["float32", "bfloat16", "float16"]
Loss = Literal["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid"]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Stage(BaseModel):
    """Base of the stage models: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    RUNTIME: ClassVar[frozenset[str]] = frozenset()

    def recipe(self) -> dict[str, Any]:
        """The JSON form of the fields that can change what the stage produces."""
        return self.model_dump(mode="json", exclude=set(self.RUNTIME))


class Source(Stage):
    """One place that prompts come from."""

    RUNTIME = frozenset({"path"})  # the bytes count, not where they lie

    path: str = Field(
        min_length=1,
        description="Prompt file (.jsonl, .parquet), folder of a saved data set, or a data set's name on the "
        "Hugging Face Hub (org/name).",
    )
    weight: float | None = Field(
        default=None, gt=0, description="Share of this source in the mixture, relative to the others'; all or none."
    )
    domain: str | None = Field(default=None, description="Domain of the rows that name none themselves.")
    split: str | None = Field(default=None, description="Split of a data set, e.g. train.")
    subset: str | None = Field(default=None, description="Configuration of a data set on the Hub.")
    revision: str | None = Field(default=None, description="Pinned revision of a data set on the Hub.")


class PromptsConfig(Stage):
    """Where prompts come from and how they are split: by a hash of each prompt's key, never by position."""

    RUNTIME = frozenset({"expected_prompts"})

    sources: list[Source] = Field(min_length=1, description="Where prompts come from; weights make a mixture.")
    held_out_sources: list[Source] = Field(
        default=[],
        description="Prompts that only acceptance reads; what also stands in `sources` is not trained on.",
    )
    limit: int | None = Field(
        default=None, ge=3, description="Use at most so many prompts of `sources` (the first in key order)."
    )
    held_out_ratio: float = Field(
        default=0.1, ge=0, lt=1, description="Share of `sources` kept for the acceptance measurement."
    )
    val_ratio: float = Field(
        default=0.1, gt=0, lt=1, description="Share of the remaining prompts that validates instead of training."
    )
    split_seed: int = Field(default=0, ge=0, description="Changes which prompts fall into which split.")
    max_rejected_share: float = Field(
        default=0.05, ge=0, lt=1, description="The stage fails when a larger share of prompts cannot be read."
    )
    expected_prompts: int | None = Field(
        default=None, ge=1, description="What `slipstream plan` counts with while the files are not there."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and not all(weighted):
            raise ValueError("give every one of sources a weight, or none")
        if any(source.weight is not None for source in self.held_out_sources):
            raise ValueError("held_out_sources are read whole: weights belong to sources")
        if self.held_out_ratio == 0 and not self.held_out_sources:
            raise ValueError("set held_out_ratio above 0 or name held_out_sources: acceptance needs unseen prompts")
        return self


class VerifierConfig(Stage):
    """The large model that is to decode faster."""

    path: str = Field(description="Folder of the verifier: config.json, safetensors, tokenizer.")
    shape: str | None = Field(
        default=None,
        description="Name under slipstream/verifiers/ whose published shape `plan` uses while the folder is absent.",
    )
    dtype: Dtype = Field(default="bfloat16", description="Type in which servers compute and write hidden states.")
    max_model_len: int = Field(default=4096, ge=16, description="Longest prompt plus answer served, in tokens.")
    reasoning_parser: str | None = Field(default="kimi_k2", description="vLLM's --reasoning-parser; null for none.")
    tool_call_parser: str | None = Field(
        default=None, description="vLLM's --tool-call-parser; without one, no tool call is followed by its result."
    )
    trust_remote_code: bool = Field(default=False, description="Run Python code that ships with the verifier.")
    revision: str | None = Field(default=None, description="Pinned revision; required with trust_remote_code.")

    @model_validator(mode="after")
    def _code_is_pinned(self) -> Self:
        if self.trust_remote_code and not self.revision:
            raise ValueError("trust_remote_code needs a pinned revision: it runs code from the verifier's folder")
        return self


class ServersConfig(Stage):
    """How vLLM servers are started on this host.  Nothing here changes what a stage produces."""

    RUNTIME = frozenset(
        {
            "python",
            "device",
            "gpus",
            "tensor_parallel",
            "startup_timeout_s",
            "kv_cache_gib",
            "max_num_seqs",
            "extra_args",
            "traces_endpoints",
            "features_endpoints",
            "features_storage",
            "start_ahead",
            "runner",
            "ray_address",
        }
    )

    python: str = Field(default=".venv-serve/bin/python", description="Interpreter of the serve environment.")
    device: Literal["cpu", "cuda"] = Field(default="cuda", description="Where servers run.")
    gpus: int = Field(default=1, ge=1, description="GPUs that servers may use on this host; on a CPU, servers at once.")
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs of one server; gpus / tensor_parallel replicas.")
    startup_timeout_s: float = Field(default=1800, gt=0, description="Seconds until a server must generate a token.")
    kv_cache_gib: int = Field(default=1, ge=1, description="KV cache of a CPU server, in GiB.")
    max_num_seqs: int = Field(default=64, ge=1, description="Sequences that a server decodes at once.")
    extra_args: list[str] = Field(default=[], description="Further vLLM arguments, for every server.")
    traces_endpoints: list[str] = Field(default=[], description="Running servers (…/v1) to take traces from instead.")
    features_endpoints: list[str] = Field(default=[], description="Running hidden-state servers (…/v1) to use instead.")
    features_storage: str | None = Field(
        default=None, description="Folder into which the servers of features_endpoints write, as seen from here."
    )

    start_ahead: bool = Field(
        default=False, description="Start the next stage's server while a stage runs; CPU hosts with two cores."
    )
    runner: Literal["threads", "ray"] = Field(
        default="threads",
        description="Who runs a capture's shards: threads of this process, on this host's GPUs, or Ray, on several "
        "hosts that see the work directory under one path; there every shard starts a server of its own.",
    )
    ray_address: str | None = Field(
        default=None, description="Running Ray cluster (host:port or auto); null starts one here for the capture."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.start_ahead and self.device != "cpu":
            raise ValueError("start_ahead is for device cpu: two servers do not share a GPU")
        if self.start_ahead and self.runner == "ray":
            raise ValueError("start_ahead is for runner threads: Ray's tasks start servers of their own")
        if self.ray_address and self.runner != "ray":
            raise ValueError(f"ray_address ({self.ray_address}) is for runner ray, and runner is {self.runner}")
        if self.gpus % self.tensor_parallel:
            raise ValueError(f"gpus ({self.gpus}) must be a multiple of tensor_parallel ({self.tensor_parallel})")
        if self.features_endpoints and not self.features_storage:
            raise ValueError("features_endpoints needs features_storage: the folder its servers write into")
        return self

    @property
    def replicas(self) -> int:
        """Servers that run side by side."""
        return self.gpus // self.tensor_parallel


class Sampling(Stage):
    """One way of asking.  Every prompt draws one by weight, from a hash of its key."""

    weight: float = Field(default=1.0, gt=0, description="Share of the prompts that are asked this way.")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling; 1 is off.")
    top_k: int = Field(default=0, ge=0, description="Top-k sampling; 0 is off.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="vLLM's reasoning_effort; null leaves it to the chat template."
    )
    thinking: bool = Field(
        default=True, description="False asks the chat template for an answer without thinking, and wants none."
    )


class TracesConfig(Stage):
    """The verifier's own answers to the training and validation prompts."""

    RUNTIME = frozenset(
        {
            "concurrency",
            "request_timeout_s",
            "max_attempts",
            "endpoint_patience_s",
            "max_rejected_share",
            "max_truncated_share",
            "max_mismatch_share",
            "expected_tokens_per_trace",
            "imported",
        }
    )

    imported: str | None = Field(
        default=None,
        description="Folder of a traces artifact to use instead of asking the verifier (see `slipstream import`); "
        "held-out prompts still come from prompts.",
    )
    max_tokens: int = Field(default=2048, ge=1, description="Longest answer, thinking included, in tokens.")
    sampling: list[Sampling] = Field(
        default=[Sampling()], min_length=1, description="How to ask: one entry, or several with weights."
    )
    seed: int = Field(default=0, ge=0, description="Every request's seed is derived from this and the prompt's key.")
    reasoning: bool = Field(default=True, description="A trace without a thinking part is rejected.")
    keep_truncated: bool = Field(
        default=True, description="Keep traces cut by max_tokens (as they are, unclosed) instead of rejecting them."
    )
    min_supervised_share: float = Field(
        default=0.0001, ge=0, le=1, description="A row whose generated share of all tokens is smaller is rejected."
    )
    max_supervised_share: float = Field(
        default=0.9999, ge=0, le=1, description="A row whose generated share of all tokens is larger is rejected."
    )
    concurrency: int = Field(
        default=32, ge=1, description="Most requests in flight; the number in use follows the servers' throughput."
    )
    request_timeout_s: float = Field(default=1800, gt=0, description="Seconds for one answer.")
    max_attempts: int = Field(default=5, ge=1, description="Attempts per request on transient failures.")
    endpoint_patience_s: float = Field(
        default=120, gt=0, description="Seconds that all servers may be away before the stage fails."
    )
    max_rejected_share: float = Field(default=0.05, ge=0, lt=1, description="The stage fails above this share.")
    max_truncated_share: float = Field(
        default=0.5, ge=0, le=1, description="The stage fails when a larger share of answers was cut by max_tokens."
    )
    max_mismatch_share: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Where a server returns no token ids: the share of rebuilt rows that may disagree with its counts.",
    )
    expected_tokens_per_trace: int = Field(
        default=1024, ge=1, description="Prompt and answer, in tokens; what `slipstream plan` counts with."
    )

    @model_validator(mode="after")
    def _shares_in_order(self) -> Self:
        if self.min_supervised_share > self.max_supervised_share:
            raise ValueError("min_supervised_share must not be larger than max_supervised_share")
        return self


class FeaturesConfig(Stage):
    """Hidden states of the traces: auxiliary layers and the final one.

    Layer id k is the residual stream before layer k (transformers' `hidden_states[k]`); the final id
    equals the number of layers and is the state before the final norm.
    """

    RUNTIME = frozenset(
        {
            "shards",
            "concurrency",
            "request_timeout_s",
            "max_attempts",
            "max_lost_share",
            "max_server_restarts",
            "endpoint_patience_s",
            "disk_reserve_gib",
            "disk_patience_s",
            "probe_samples",
            "probe_all_layers",
            "checked_reads",
            "read_ahead",
        }
    )

    layer_ids: list[int] = Field(
        min_length=1, description="Auxiliary layer ids, ascending; the final layer's is added by itself."
    )
    store: Literal["native", "fp8", "none"] = Field(
        default="native",
        description="How states are kept: in the verifier's type, as per-token float8_e4m3 (half of bfloat16's bytes), "
        "or not at all: the trainer asks the server as it goes.",
    )
    capture_while_generating: bool = Field(
        default=False,
        description="Take the states in the pass that generates the traces; rows then end before their last token.",
    )
    shards: int = Field(default=1, ge=1, description="Row ranges captured as separate tasks.")
    concurrency: int = Field(default=8, ge=1, description="Requests in flight for one shard.")
    request_timeout_s: float = Field(default=600, gt=0, description="Seconds for one sample, its file included.")
    max_attempts: int = Field(default=3, ge=1, description="Attempts per sample on transient failures.")
    max_lost_share: float = Field(default=0.01, ge=0, lt=1, description="The stage fails above this share.")
    max_server_restarts: int = Field(default=3, ge=0, description="Times a shard starts a server that died again.")
    endpoint_patience_s: float = Field(
        default=600,
        gt=0,
        description="Seconds that all of servers.features_endpoints may be away before the shard fails.",
    )
    disk_reserve_gib: float = Field(
        default=1.0, ge=0, description="Capture pauses while the store's disk has less free, in GiB."
    )
    disk_patience_s: float = Field(default=3600, gt=0, description="Seconds that such a pause may last.")
    probe_samples: int = Field(
        default=2, ge=0, description="Samples of each shard captured again and compared; 0 probes nothing."
    )
    probe_all_layers: bool = Field(
        default=True,
        description="Once per verifier, capture a few samples at every layer: it shows that ids mean what they say.",
    )
    checked_reads: float = Field(
        default=1.0, ge=0, le=1, description="Share of samples whose checksum the trainer compares when it reads them."
    )
    read_ahead: int = Field(default=32, ge=0, description="Samples that the trainer has the disk read ahead.")

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if sorted(set(self.layer_ids)) != self.layer_ids or self.layer_ids[0] < 0:
            raise ValueError(f"layer_ids must be ascending, distinct and not negative, got {self.layer_ids}")
        if self.capture_while_generating and self.store == "none":
            raise ValueError("capture_while_generating needs a store to capture into: native or fp8")
        return self


class VocabularyConfig(Stage):
    """The drafter's smaller vocabulary: the most frequent supervised tokens plus every control token."""

    mapping: Literal["traces", "init_from"] = Field(
        default="traces",
        description="Whose tokens: the most frequent ones of the traces, or those of drafter.init_from, unchanged "
        "(size is then its size).",
    )
    size: int = Field(default=32000, ge=1, description="Tokens in the draft vocabulary.")
    must_keep: list[int] = Field(default=[], description="Token ids that are in whatever their frequency.")
    sweep: list[int] = Field(
        default=[8000, 16000, 24000, 32000, 48000, 64000],
        description="Sizes for which the coverage of the traces is shown beside the chosen one; other sizes cost no "
        "extraction and leave the maps as they are.",
    )


# Of each rope type, beside the factor: fields without which it is undefined, and fields that have a default.
ROPE_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": ((), ()),
    "dynamic": ((), ()),
    "yarn": (("original_max_position_embeddings",), ("attention_factor", "beta_fast", "beta_slow", "truncate")),
    "llama3": (("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
}


class RopeScaling(Stage):
    """Rotary scaling under transformers' names; what a type does not use stays null."""

    rope_type: Literal["linear", "dynamic", "yarn", "llama3"] = Field(description="Kind of scaling.")
    factor: float = Field(gt=0, description="How many times longer the context becomes.")
    original_max_position_embeddings: int | None = Field(default=None, ge=1, description="Context before scaling.")
    attention_factor: float | None = Field(default=None, gt=0, description="yarn: scale of the attention.")
    beta_fast: float | None = Field(default=None, gt=0, description="yarn: boundary of the extrapolated part.")
    beta_slow: float | None = Field(default=None, gt=0, description="yarn: boundary of the interpolated part.")
    truncate: bool | None = Field(default=None, description="yarn: whole dimensions as boundaries; null: yes.")
    low_freq_factor: float | None = Field(default=None, gt=0, description="llama3: low-frequency boundary.")
    high_freq_factor: float | None = Field(default=None, gt=0, description="llama3: high-frequency boundary.")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        needed, optional = ROPE_FIELDS[self.rope_type]
        given = {name for name, value in self if value is not None} - {"rope_type", "factor"}
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f"rope type {self.rope_type} needs {missing[0]}")
        if strange := sorted(given - {*needed, *optional}):
            raise ValueError(f"rope type {self.rope_type} does not use {strange[0]}: leave it out")
        return self


class DraftShape(Stage):
    """Shape of the drafter's decoder layers (Llama type)."""

    num_layers: int = Field(default=1, ge=1, le=1, description="Decoder layers; the flat form holds one.")
    num_attention_heads: int = Field(ge=1, description="Query heads.")
    num_key_value_heads: int = Field(ge=1, description="Key and value heads.")
    head_dim: int = Field(ge=2, description="Width of one head.")
    intermediate_size: int = Field(ge=1, description="Width of the MLP.")
    rms_norm_eps: float = Field(default=1e-6, gt=0, description="Epsilon of the RMS norms.")
    rope_theta: float = Field(default=1e6, gt=0, description="Base of the rotary embedding.")
    rope_scaling: RopeScaling | None = Field(default=None, description="Scaling of the rotary embedding; null: none.")
    max_position_embeddings: int = Field(default=262144, ge=16, description="Longest position, in tokens.")
    norm_before_residual: bool = Field(default=False, description="The residual takes the normed state.")
    norm_before_fc: bool = Field(default=False, description="One norm over the concatenated auxiliary states.")
    fc_norm: bool = Field(default=False, description="A norm for each auxiliary state before they are concatenated.")
    norm_output: bool = Field(default=False, description="The normed state is fed back from step to step.")

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are two answers to one question: set one of them")
        return self


class DrafterConfig(Stage):
    """Training of the EAGLE-3 drafter by speculators' Trainer."""

    RUNTIME = frozenset(
        {
            "devices",
            "num_workers",
            "log_every",
            "threads",
            "trackers",
            "checkpoint_steps",
            "keep_checkpoints",
            "max_loss_factor",
        }
    )

    published: str | None = Field(
        default=None, description="Published drafter (a name under slipstream/drafters/) whose shape is taken."
    )
    shape: DraftShape | None = Field(
        default=None,
        description="Shape of the decoder layers; null takes the published drafter's, or one made from the verifier.",
    )
    init_from: str | None = Field(
        default=None, description="Checkpoint folder to warm-start from (EAGLE-3, flat or speculators form)."
    )
    train_lm_head: bool = Field(
        default=False, description="Train the output head too; it starts from the verifier's rows, or the warm start's."
    )
    epochs: int = Field(default=5, ge=0, description="Passes over the training rows; 0 exports the initial drafter.")
    early_stop_patience: int | None = Field(
        default=None, ge=1, description="Stop after so many epochs without a longer accepted length; null never stops."
    )
    learning_rate: float = Field(default=3e-5, gt=0, description="Peak learning rate.")
    scheduler: Literal["cosine", "linear", "none"] = Field(default="cosine", description="Learning-rate schedule.")
    warmup_ratio: float = Field(default=0.01, ge=0, le=1, description="Share of all steps that warms up.")
    optimizer: Literal["adamw", "muon"] = Field(default="adamw", description="Muon takes the matrices, AdamW the rest.")
    muon_learning_rate: float = Field(default=0.02, gt=0, description="Peak learning rate of Muon's matrices.")
    weight_decay: float = Field(default=0.01, ge=0, description="AdamW's weight decay.")
    sequence_length: int = Field(default=2048, ge=16, description="Tokens of one packed step; longer rows are cut.")
    ttt_steps: int = Field(default=3, ge=1, description="Training-time-test steps.")
    ttt_step_loss_decay: float = Field(default=1.0, gt=0, le=1, description="Weight of each further step's loss.")
    loss: Loss = Field(default="kl_div", description="Loss against the verifier's distribution.")
    loss_weights: dict[Loss, float] = Field(default={}, description="A weighted sum of losses instead of `loss`.")
    noise: float = Field(
        default=0.0,
        ge=0,
        description="Uniform noise within plus and minus this on training's auxiliary hidden states; 0 adds none.",
    )
    compute_dtype: Dtype = Field(default="bfloat16", description="Type of the forward pass; weights stay float32.")
    fp8_linears: bool = Field(
        default=False, description="Linear layers in float8 (torchao, rowwise) over float32 weights; Hopper or newer."
    )
    distributed: Literal["ddp", "fsdp"] = Field(default="ddp", description="How several devices train.")
    seed: int = Field(default=0, ge=0, description="Seed of the initial weights and of the data order.")
    replay_tokens: int = Field(
        default=3, ge=1, description="Tokens a chain drafts in the replay that names the best epoch."
    )
    replay_rows: int | None = Field(
        default=None, ge=1, description="Validation rows replayed after each epoch; null takes all."
    )
    keep_initial: bool = Field(default=False, description="Export the drafter as it was before training, too.")
    export_embeddings: bool = Field(
        default=True, description="Exports carry the embedding; without it servers share the verifier's."
    )
    checkpoint_steps: int | None = Field(
        default=None, ge=1, description="Steps between two checkpoints inside an epoch; null makes one an epoch."
    )
    keep_checkpoints: Literal["best_and_last", "all"] = Field(
        default="best_and_last", description="Checkpoints that stay when a later one is complete; exports all stay."
    )
    max_loss_factor: float = Field(
        default=20.0, gt=1, description="Training fails when a loss is so many times the median of the last ones."
    )
    trackers: list[Literal["tensorboard", "trackio", "mlflow", "wandb"]] = Field(
        default=[], description="Where speculators' metric logger writes besides the metrics file."
    )
    devices: list[int] = Field(default=[0], description="GPU indices to train on; empty trains on the CPU.")
    num_workers: int = Field(default=4, ge=0, description="Data loader processes; 0 loads in the main process.")
    threads: int = Field(default=0, ge=0, description="CPU threads of the trainer; 0 leaves it to torch.")
    log_every: int = Field(default=10, ge=1, description="Steps between two lines of metrics.")

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        if self.published and self.shape:
            raise ValueError(f"published ({self.published}) and shape are two answers to one question: set one of them")
        return self

    @model_validator(mode="after")
    def _float8_is_possible(self) -> Self:
        if self.fp8_linears and not self.devices:
            raise ValueError("fp8_linears needs a GPU, and devices is empty: training runs on the CPU")
        if self.fp8_linears and self.distributed == "fsdp":
            raise ValueError("fp8_linears is for distributed ddp, and distributed is fsdp")
        if self.fp8_linears and self.compute_dtype == "float32":
            raise ValueError("fp8_linears needs compute_dtype bfloat16 or float16 for the rest, and it is float32")
        if self.fp8_linears and self.sequence_length % 16:  # torch's scaled product of gradient and input sums over it
            raise ValueError(f"fp8_linears needs a sequence_length that 16 divides, and it is {self.sequence_length}")
        return self

    @model_validator(mode="after")
    def _devices_are_distinct(self) -> Self:
        if len(set(self.devices)) < len(self.devices) or min(self.devices, default=0) < 0:
            raise ValueError(f"devices must be different GPU indices from 0 up, got {self.devices}")
        return self

    @model_validator(mode="after")
    def _losses_weigh(self) -> Self:
        weights = self.loss_weights.values()
        if self.loss_weights and (min(weights) < 0 or not any(weights)):
            raise ValueError(f"loss_weights must not be negative nor all 0, got {self.loss_weights}")
        return self


class AcceptanceConfig(Stage):
    """The measurement on a vLLM server: with the drafter, without it, on held-out prompts."""

    RUNTIME = frozenset({"request_timeout_s"})

    draft_tokens: int = Field(default=3, ge=1, description="Tokens drafted a step.")
    max_prompts: int | None = Field(default=None, ge=1, description="Measure on at most so many held-out prompts.")
    max_tokens: int = Field(default=2048, ge=1, description="Longest answer, in tokens; greedy.")
    concurrency: int = Field(default=8, ge=1, description="Requests in flight.")
    rounds: int = Field(default=1, ge=1, description="Times that both servers answer all prompts, in turn.")
    untrained: bool = Field(
        default=False,
        description="Measure the drafter before training as well, as the floor of the figures; needs keep_initial.",
    )
    request_timeout_s: float = Field(default=1800, gt=0, description="Seconds for one answer.")


class Rates(Stage):
    """Throughputs that `slipstream plan` estimates hours from; measured figures belong here."""

    traces_tokens_per_s: float = Field(default=757, gt=0, description="Tokens generated and read a second.")
    features_tokens_per_s: float = Field(default=3165, gt=0, description="Tokens captured a second.")
    training_tokens_per_s: float = Field(default=8500, gt=0, description="Tokens trained on a second.")


class RunConfig(BaseModel):
    """Everything that one run needs, from prompts to the verdict."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9.-]*$", description="Name of the run: `runs/<name>` in the work directory."
    )
    workdir: str | None = Field(default=None, description="Work directory; null takes SLIPSTREAM_WORKDIR or ./work.")
    prompts: PromptsConfig
    verifier: VerifierConfig
    servers: ServersConfig = ServersConfig()
    traces: TracesConfig = TracesConfig()
    features: FeaturesConfig
    vocabulary: VocabularyConfig = VocabularyConfig()
    drafter: DrafterConfig
    acceptance: AcceptanceConfig = AcceptanceConfig()
    rates: Rates = Rates()

    @field_validator("name")
    @classmethod
    def _not_the_link(cls, name: str) -> str:
        if name == "latest":
            raise ValueError("`latest` is the link to the newest run; choose another name")
        return name

    @model_validator(mode="after")
    def _untrained_is_kept(self) -> Self:
        if self.acceptance.untrained and not self.drafter.keep_initial:
            raise ValueError("acceptance.untrained needs drafter.keep_initial: there is nothing to measure otherwise")
        return self

    @model_validator(mode="after")
    def _mapping_has_a_source(self) -> Self:
        if self.vocabulary.mapping == "init_from" and not self.drafter.init_from:
            raise ValueError("vocabulary.mapping init_from needs drafter.init_from: there is no mapping to keep")
        return self

    @model_validator(mode="after")
    def _imported_rows_are_whole(self) -> Self:
        if self.traces.imported and self.features.capture_while_generating:
            raise ValueError(
                "traces.imported leaves nothing to generate: set features.capture_while_generating to false"
            )
        return self

    @model_validator(mode="after")
    def _states_can_be_taken(self) -> Self:
        named, extraction = self.servers.traces_endpoints, self.servers.features_endpoints
        if self.features.capture_while_generating and (strangers := sorted({*named} - {*extraction})):
            raise ValueError(
                f"capture_while_generating takes states from the servers that generate, and {strangers[0]} of "
                "servers.traces_endpoints is not among servers.features_endpoints (extraction servers that write into "
                "features_storage); name it there as well, or leave traces_endpoints empty"
            )
        return self

    @property
    def root(self) -> Path:
        """The work directory as an absolute path."""
        return Path(self.workdir or os.environ.get("SLIPSTREAM_WORKDIR") or "work").absolute()

    def with_features(self, features: FeaturesConfig) -> RunConfig:
        """The same configuration with these features; raises ValidationError when both do not go together."""
        return RunConfig.model_validate(self.model_dump() | {"features": features.model_dump()})

    def anchored(self) -> RunConfig:
        """The same configuration with absolute paths, for tasks that do not run in this directory."""
        storage = self.servers.features_storage
        servers = {
            "python": str(Path(self.servers.python).absolute()),
            "features_storage": storage and str(Path(storage).absolute()),
        }
        return self.model_copy(
            update={
                "workdir": str(self.root),
                "verifier": self.verifier.model_copy(update={"path": str(Path(self.verifier.path).absolute())}),
                "servers": self.servers.model_copy(update=servers),
            }
        )


def load_config(path: Path) -> RunConfig:
    """The configuration in the YAML file `path`.

    Raises InputError with one sentence: an unreadable file, bad YAML, or the first field that is wrong.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot read the configuration ({error.strerror or error})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a mapping of settings, see deployments/pocket.yaml for a complete one")
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{path}: {describe(error)}") from error


def describe(error: ValidationError) -> str:
    """The first problem of a pydantic error as one sentence that names the key."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "the configuration"
    if first["type"] == "extra_forbidden":
        return f"unknown key `{where}`: remove it or correct its spelling"
    message = first["msg"].removeprefix("Value error, ")
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"`{where}`: {message[:1].lower()}{message[1:]}{more}"


def rehearsal(config: RunConfig) -> RunConfig:
    """`config` cut down to what one runs before a five-hour job.

    Same code path and servers: 10 prompts, one training device, 3 epochs, 20 % validation, no data
    workers (errors surface in the main process) and a work directory of its own.
    """
    name = f"{config.name}-rehearsal"
    changes: dict[str, Any] = {
        "name": name,
        "workdir": str(config.root / "rehearsals" / config.name),
        "prompts": config.prompts.model_copy(
            update={"limit": 10, "val_ratio": 0.2, "held_out_ratio": 0.2 if not config.prompts.held_out_sources else 0}
        ),
        "drafter": config.drafter.model_copy(
            update={"devices": config.drafter.devices[:1], "epochs": 3, "num_workers": 0}
        ),
        "acceptance": config.acceptance.model_copy(update={"max_prompts": 10, "rounds": 1}),
    }
    return config.model_copy(update=changes)
