"""What a config.json leaves out: the defaults of transformers' configuration class for its model type.

Published files are often written as differences from those defaults (google/gemma-3-4b-it names neither its
vocabulary nor its heads).  Only the class is looked at; nothing of the verifier runs.
"""

from __future__ import annotations

from typing import Any


def class_default(model_type: object, field: str) -> Any:
    """The default of `field` for `model_type`; None where transformers has no such class or no such field."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # half a second: only where it is needed

    try:
        return getattr(CONFIG_MAPPING[str(model_type)], field, None)
    except KeyError:
        return None
