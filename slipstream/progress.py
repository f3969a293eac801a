"""How stages tell how far they are, without knowing who listens (a Prefect artifact, a terminal, nobody)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Progress:
    """`done` of `total` units; `figures` are a few named numbers worth reading meanwhile."""

    done: int
    total: int
    unit: str
    figures: Mapping[str, float | int | str] = field(default_factory=dict)


Report = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Listens to nothing."""
