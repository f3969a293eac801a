"""What a verifier is: its shape, its special tokens, its identity, and which layer ids make sense.

Reads `config.json` (also when the language model's fields are nested under `text_config`) and the
tokenizer's files; loads no weights and runs no code of the verifier.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from slipstream import rope
from slipstream.config import RopeScaling, RunConfig, VerifierConfig
from slipstream.digest import digest
from slipstream.errors import InputError
from slipstream.text_fields import TextFields

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
TEXTS = frozenset({".json", ".jinja", ".py", ".txt"})  # configuration, tokenizer, template, generation defaults
TOKENIZER = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt")
HASHED_WHOLE = 64 << 20  # larger weight files are named by size, header and a sample


@dataclass(frozen=True)
class Shape:
    """The figures of a verifier that everything after it depends on.

    The fields proper are what a run cannot do without; the properties are what its drafter's defaults are made from,
    None where the model has no such thing or nobody says it.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    text: TextFields = field(default_factory=lambda: TextFields({}, {}, ""), repr=False, compare=False)

    @property
    def final_layer_id(self) -> int:
        """Id of the last residual state: before the final norm, after the last layer."""
        return self.num_layers

    @property
    def text_model_type(self) -> str:
        """The language model's own type (`kimi_k2` inside `kimi_k25`)."""
        return self.text.model_type

    @property
    def num_attention_heads(self) -> int | None:
        """Query heads."""
        return self.text.whole("num_attention_heads")

    @property
    def num_key_value_heads(self) -> int | None:
        """Key and value heads; all query heads where nothing else is said."""
        return self.text.whole("num_key_value_heads") or self.num_attention_heads

    @property
    def latent_attention(self) -> bool:
        """MLA (DeepSeek, Kimi): keys and values are read from a latent, so there is no width of a head."""
        return self.text.get("kv_lora_rank") is not None

    @property
    def head_dim(self) -> int | None:
        """Width of one head; hidden size over heads only where no field says it; None under latent attention."""
        if self.latent_attention:
            return None
        heads = self.num_attention_heads
        return self.text.whole("head_dim") or (self.hidden_size // heads if heads else None)

    @property
    def intermediate_size(self) -> int | None:
        """Width of the MLP (of dense layers, where the file names two)."""
        named = "intermediate_size_mlp" if "intermediate_size_mlp" in self.text.nested else "intermediate_size"
        return self.text.whole(named)

    @property
    def rms_norm_eps(self) -> float | None:
        """Epsilon of the RMS norms."""
        value = self.text.get("rms_norm_eps")
        return None if value is None else float(value)

    @property
    def max_position_embeddings(self) -> int | None:
        """Longest position, in tokens."""
        return self.text.whole("max_position_embeddings")

    @property
    def sliding_window(self) -> int | None:
        """Width of the sliding-window layers' attention, in tokens."""
        return self.text.whole("sliding_window") if self.text.get("use_sliding_window") is not False else None

    @property
    def tied(self) -> bool | None:
        """Whether the head is the embedding; None where neither the file nor transformers' class says it."""
        value = self.text.get("tie_word_embeddings")
        return None if value is None else bool(value)

    def rope(self) -> tuple[float, RopeScaling | None]:
        """Theta and scaling of the rotary embedding; raises InputError for what no drafter is trained with."""
        return rope.read(self.text.nested, self.text.where)


def shape_of(config: Mapping[str, Any], where: str) -> Shape:
    """The shape in a `config.json` mapping; raises InputError naming the field that is missing."""
    text = TextFields.of(config, where)
    eos = text.get("eos_token_id")
    return Shape(
        model_type=str(config.get("model_type", text.model_type)),
        hidden_size=text.needed("hidden_size"),
        num_layers=text.needed("num_hidden_layers"),
        vocab_size=text.needed("vocab_size"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (int(eos),)),
        text=text,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises InputError naming the file when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object")
    return value


def folder_of(config: VerifierConfig) -> Path:
    """The verifier's folder; raises InputError when it or its config.json is missing."""
    folder = Path(config.path)
    if not folder.is_dir():
        raise InputError(f"{config.path}: no such verifier folder; set verifier.path to a downloaded model")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder / 'config.json'}: missing, so {folder} is not a model folder")
    return folder


def load_shape(config: VerifierConfig) -> Shape:
    """The shape of the verifier in its folder."""
    path = folder_of(config) / "config.json"
    return shape_of(read_json(path), str(path))


def architectures(folder: Path) -> list[str]:
    """The classes that the verifier's config.json names; none without a file."""
    path = folder / "config.json"
    return list(read_json(path).get("architectures") or []) if path.is_file() else []


def published_shape(name: str) -> Shape:
    """The shape of a published verifier by its name under slipstream/verifiers/."""
    file = resources.files("slipstream") / "verifiers" / f"{name}.json"
    if not file.is_file():
        known = sorted(p.name.removesuffix(".json") for p in (resources.files("slipstream") / "verifiers").iterdir())
        raise InputError(f"verifier.shape: no published shape named {name!r}; known are {', '.join(known)}")
    return shape_of(json.loads(file.read_text(encoding="utf-8")), f"verifiers/{name}.json")


def known_shape(config: VerifierConfig) -> tuple[Shape, str]:
    """The verifier's shape and where it was read: its folder, or the published shape while that is absent."""
    if config.shape and not (Path(config.path) / "config.json").is_file():
        return published_shape(config.shape), f"published shape {config.shape}"
    return load_shape(config), config.path


def special_tokens(folder: Path) -> dict[str, int]:
    """Control tokens by text: every added token that the tokenizer's files name, ascending by id.

    Read from `tokenizer.json` and from `added_tokens_decoder` in `tokenizer_config.json` (Kimi's own
    tokenizer has only the latter).  Raises InputError when the two disagree about an id.
    """
    found: dict[str, int] = {}
    sources: list[tuple[Path, dict[str, int]]] = []
    path = folder / "tokenizer_config.json"
    if path.is_file():
        decoder = read_json(path).get("added_tokens_decoder", {})
        sources.append((path, {entry["content"]: int(token) for token, entry in decoder.items()}))
    path = folder / "tokenizer.json"
    if path.is_file():
        sources.append(
            (path, {entry["content"]: int(entry["id"]) for entry in read_json(path).get("added_tokens", [])})
        )
    if not sources:
        raise InputError(f"{folder}: neither tokenizer.json nor tokenizer_config.json, so no tokenizer to read")
    for where, tokens in sources:
        wrong = [text for text, token in tokens.items() if found.setdefault(text, token) != token]
        if wrong:
            listed = ", ".join(f"{text} has id {tokens[text]} here and {found[text]}" for text in wrong)
            raise InputError(f"{where}: {listed} in the other tokenizer file; restore the published files")
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _weight_identity(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        if size <= HASHED_WHOLE:
            hasher.update(file.read())
        else:
            header = int.from_bytes(file.read(8), "little")
            hasher.update(file.read(min(header, 32 << 20)))
            for offset in (size // 2, size - (1 << 20)):
                file.seek(offset)
                hasher.update(file.read(1 << 20))
    return {"size": size, "sha256": hasher.hexdigest()}


def identity(config: VerifierConfig) -> str:
    """A digest that changes when the verifier does: its configuration, tokenizer, template and weights.

    Weight files up to 64 MiB are hashed whole; larger ones by size, safetensors header and two samples of
    1 MiB, so that a terabyte costs seconds.
    """
    folder = folder_of(config)
    texts = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.is_file() and (path.suffix in TEXTS or path.name == "tiktoken.model")
    }
    weights = {path.name: _weight_identity(path) for path in sorted(folder.glob("*.safetensors"))}
    if not weights:
        raise InputError(f"{folder}: no .safetensors file, so there are no weights to serve")
    return digest({"texts": texts, "weights": weights, "revision": config.revision})


def tokenizer_identity(config: VerifierConfig) -> str:
    """A digest of the files that decide what a token id means; the chat template is not among them."""
    folder = folder_of(config)
    held = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in TOKENIZER
        if (folder / name).is_file()
    }
    return digest({"files": held, "special": special_tokens(folder)})


def capture_ids(layer_ids: list[int], shape: Shape) -> list[int]:
    """Ids to capture: the auxiliary ones and the final state last; raises InputError when one does not exist.

    Id k is the residual stream before layer k, so auxiliary ids run from 1 (0 is the embedding, which no
    layer has touched) to `num_layers - 1`; `num_layers` is the final state and is never auxiliary.
    """
    for layer in layer_ids:
        if layer == shape.final_layer_id:
            raise InputError(
                f"features.layer_ids: {layer} is the final state of this verifier and is captured by itself; "
                f"auxiliary ids go up to {shape.num_layers - 1}"
            )
        if not 1 <= layer < shape.num_layers:
            raise InputError(
                f"features.layer_ids: {layer} is not an auxiliary layer of this verifier; "
                f"with {shape.num_layers} layers ids go from 1 to {shape.num_layers - 1}"
            )
    return [*layer_ids, shape.final_layer_id]


def check(config: RunConfig) -> Shape:
    """Everything about the configuration that the verifier decides; raises InputError with one sentence."""
    shape = load_shape(config.verifier)
    capture_ids(config.features.layer_ids, shape)
    special = special_tokens(folder_of(config.verifier))
    if config.vocabulary.size > shape.vocab_size:
        raise InputError(
            f"vocabulary.size: {config.vocabulary.size} draft tokens are more than the verifier's {shape.vocab_size}"
        )
    kept = set(special.values()) | set(config.vocabulary.must_keep) | set(shape.eos_token_ids)
    if beyond := sorted(token for token in kept if not 0 <= token < shape.vocab_size):
        raise InputError(f"vocabulary.must_keep: token ids {beyond} do not lie in 0 … {shape.vocab_size - 1}")
    if config.vocabulary.mapping == "traces" and len(kept) > config.vocabulary.size:
        raise InputError(
            f"vocabulary.size: {config.vocabulary.size} is smaller than the {len(kept)} control tokens that must be in"
        )
    if config.traces.reasoning and THINK_CLOSE not in special:
        raise InputError(
            f"traces.reasoning: the tokenizer in {config.verifier.path} has no {THINK_CLOSE} token; set it to false"
        )
    return shape
