"""The language model's fields of a verifier's config.json, wherever they stand.

Multimodal files nest them under `text_config` (some under `llm_config` or `language_config`).  A field is taken from
there, some from the top level, else from transformers' configuration class for the language model's type: published
files are often written as differences from its defaults (google/gemma-3-4b-it names neither its vocabulary nor its
heads).  Only the class is looked at; nothing of the verifier runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import InputError

NESTS = ("text_config", "llm_config", "language_config")
# Fields that a top level states for its language model; widths there may be another tower's.
EITHER = frozenset({"vocab_size", "tie_word_embeddings", "rms_norm_eps", "eos_token_id"})


def class_default(model_type: object, name: str) -> Any:
    """The default of a field for `model_type`; None where transformers has no such class or no such field."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # half a second: only where it is needed

    try:
        return getattr(CONFIG_MAPPING[str(model_type)], name, None)
    except KeyError:
        return None


@dataclass(frozen=True)
class TextFields:
    """`nested` are the language model's own fields, `config` the whole file, `where` its name for messages."""

    nested: Mapping[str, Any]
    config: Mapping[str, Any]
    where: str

    @staticmethod
    def of(config: Mapping[str, Any], where: str) -> TextFields:
        """The fields in a config.json mapping."""
        nested = next(
            (config[name] for name in NESTS if isinstance(config.get(name), Mapping) and config[name]), config
        )
        return TextFields(nested, config, where)

    @property
    def model_type(self) -> str:
        """The language model's type; the whole model's where the file names no other."""
        return str(self.nested.get("model_type") or self.config.get("model_type") or "unknown")

    def get(self, name: str) -> Any:
        """The field's value; None where nobody says it."""
        for place in (self.nested, self.config) if name in EITHER else (self.nested,):
            if place.get(name) is not None:
                return place[name]
        return None if name in self.nested else class_default(self.model_type, name)

    def whole(self, name: str) -> int | None:
        """A field that is a whole number above 0, or None; raises InputError for anything else."""
        value = self.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"{self.where}: {name} is {value!r} instead of a whole number above 0")
        return value

    def needed(self, name: str) -> int:
        """A whole number that must be there; raises InputError naming it."""
        value = self.whole(name)
        if value is None:
            raise InputError(f"{self.where}: no field {name!r} for the language model, is this a verifier's config?")
        return value
