"""What the pictures of all reports share: colours, axes, PNG bytes."""

from __future__ import annotations

import io
from typing import Any

INK, MAIN, PALE = "#20303c", "#1f77b4", "#b0b7bd"


def figure_of(width: float, height: float) -> Any:
    """An empty figure (inches), without pyplot, whose state threads would share."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """A figure (inches) and its axes."""
    figure = figure_of(width, height)
    return figure, open_frame(figure.subplots())


def open_frame(axes: Any) -> Any:
    """The axes without the lines above and at the right."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes


def png(figure: Any) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80, bbox_inches="tight")
    return buffer.getvalue()


def small_png(figure: Any, colours: int = 64) -> bytes:
    """The figure as a PNG file with a palette: a third of the bytes, for pages that are updated again and again."""
    from PIL import Image

    with Image.open(io.BytesIO(png(figure))) as picture:
        reduced = picture.convert("RGB").quantize(colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    reduced.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
