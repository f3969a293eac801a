"""The page about a traces artifact, from its `summary.json` and `samples.json`: `report.html`, or Markdown.

Both say the same; every text that a model or a data set wrote is escaped.  The run's report shows parts of it.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from slipstream import atomic
from slipstream.traces import plots, samples

FILE, SUMMARY = "report.html", "summary.json"
MARKDOWN_BYTES = 100_000
LISTED = 50  # domains or reasons in a table; there may be as many as rows
CELL = 80  # characters
DOMAIN_COLUMNS = (
    "domain",
    "rows",
    "rejected",
    "truncated",
    "prompt tokens",
    "output tokens",
    "mean output",
    "reasoning share",
)
Table = list[tuple[str, ...]]


@dataclass(frozen=True)
class View:
    """What there is to see, as text: tables by row, pictures as base64 PNG by name, rendered samples."""

    outcomes: Table
    reasons: Table
    execution: Table
    domains: Table
    left_out: int
    pictures: dict[str, str]
    samples: list[dict[str, Any]]
    columns: tuple[str, ...] = DOMAIN_COLUMNS


def write(folder: Path) -> None:
    """Writes `report.html` into the artifact's folder."""
    page = render("traces/report.html", name=folder.name, view=view(folder))
    atomic.write_bytes(folder / FILE, page.encode())


def render(template: str, **values: Any) -> str:
    """A page from a template below `slipstream/`; autoescape is on."""
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("slipstream", "")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(template).render(**values)


def view(folder: Path) -> View:
    """Reads the artifact's summary and samples; no row of it."""
    figures = _read(folder / SUMMARY)
    pictures = {"Trace lengths": plots.lengths(figures), "Throughput": plots.throughput(figures.get("execution"))}
    domains = figures["domains"]
    largest = sorted(domains.items(), key=lambda item: (-item[1]["rows"], item[0]))[:LISTED]
    return View(
        outcomes=_outcomes(figures),
        reasons=_reasons(figures),
        execution=_execution(figures.get("execution")),
        domains=[_domain(name, tally) for name, tally in largest],
        left_out=len(domains) - len(largest),
        pictures={name: base64.b64encode(png).decode() for name, png in pictures.items() if png},
        samples=_read(folder / samples.FILE),
    )


def _read(path: Path) -> Any:
    """The JSON in `path`; what UTF-8 cannot hold (half of a surrogate pair in a server's words) is replaced."""
    text = json.dumps(json.loads(path.read_text()), ensure_ascii=False)
    return json.loads(text.encode("utf-8", "replace"))


def _outcomes(figures: Mapping[str, Any]) -> Table:
    total, ids = figures["total"], figures["token_ids"]
    splits = ", ".join(f"{_number(rows)} {split}" for split, rows in figures["splits"].items())
    origins = ", ".join(f"{_number(ids.get(origin, 0))} {origin}" for origin in ("server", "rebuilt", "mismatched"))
    origins = f"{_number(ids['imported'])} imported" if "imported" in ids else origins
    rejected = _share(total["rejected"], total["rejected"] + total["rows"])
    cut = _percent(figures["truncated_share"])
    rebuilt = ids.get("rebuilt") or ids.get("mismatched")
    return [
        ("conversations", _number(total["conversations"])),
        ("rows", f"{_number(total['rows'])} ({splits})"),
        ("turns answered", _number(figures["answers"])),
        ("rejected", f"{_number(total['rejected'])} ({rejected})"),
        ("answers cut by the token limit", f"{_number(figures['truncated_answers'])} ({cut})"),
        ("tokens in", _number(total["prompt_tokens"])),
        ("tokens out", _number(total["output_tokens"])),
        ("mean output", f"{_number(total['mean_output_tokens'], 1)} tokens"),
        ("reasoning share of the output", _percent(total["reasoning_share"])),
        ("token ids", origins),
        ("mismatched of the rebuilt", _percent(figures["mismatch_share"] if rebuilt else None)),
    ]


def _reasons(figures: Mapping[str, Any]) -> Table:
    total = figures["total"]
    turns = total["rejected"] + total["rows"]
    counted = sorted(figures["reasons"].items(), key=lambda item: (-item[1], item[0]))[:LISTED]
    return [(_short(reason), _number(count), _share(count, turns)) for reason, count in counted]


def _execution(execution: Mapping[str, Any] | None) -> Table:
    if execution is None:
        return []
    seconds = execution["seconds"]
    speed = execution["output_tokens"] / seconds if seconds else None
    measured = execution["throughput"]
    limit = _percent(measured.get("server_limited_share"))
    return [
        ("special tokens of verifier and server", execution["special_tokens"]),
        ("prompts answered", _number(execution["answered"])),
        ("prompts failed", _number(execution["failed"]) + (", the rest was not asked" if execution["stopped"] else "")),
        ("requests answered", _number(execution["requested"])),
        ("retried", _number(execution["retried"])),
        ("back-offs", _number(execution["backoffs"])),
        ("absences of servers", _number(execution["absences"])),
        ("seconds", _number(seconds, 1)),
        ("output tokens", _number(execution["output_tokens"])),
        ("output tokens a second", _number(speed)),
        ("CPU share of this client", _percent(measured.get("client_cpu_share"))),
        ("the server was the limit", "n/a" if limit == "n/a" else f"{limit} of the time"),
    ]


def _domain(name: str, tally: Mapping[str, Any]) -> tuple[str, ...]:
    counts = ("rows", "rejected", "truncated", "prompt_tokens", "output_tokens")
    mean, reasoning = tally["mean_output_tokens"], tally["reasoning_share"]
    return (_short(name), *(_number(tally[count]) for count in counts), _number(mean, 1), _percent(reasoning))


def _number(value: float | None, digits: int = 0) -> str:
    return "n/a" if value is None or not isfinite(value) else f"{value:,.{digits}f}"


def _percent(share: float | None) -> str:
    return "n/a" if share is None or not isfinite(share) else f"{share:.1%}"


def _share(part: int, whole: int) -> str:
    return _percent(part / whole if whole else None)


def _short(text: str) -> str:
    return text if len(text) <= CELL else f"{text[: CELL - 1]}…"


def markdown(folder: Path) -> str:
    """The same for a Prefect artifact, below MARKDOWN_BYTES: what does not fit is left out from the end."""
    seen = view(folder)
    where = f"The page, with colours: `{folder / FILE}`"
    blocks = ["# Traces", where, _table(("", ""), seen.outcomes)]
    if seen.reasons:
        blocks += ["## Rejected", _table(("reason", "turns", "share"), seen.reasons)]
    blocks += ["## This execution"]
    blocks += [_table(("", ""), seen.execution) if seen.execution else "Nothing was asked: every answer was known."]
    blocks += ["## Domains", _table(DOMAIN_COLUMNS, seen.domains)]
    if seen.left_out:
        blocks += [f"{seen.left_out:,} smaller domains are in {SUMMARY}."]
    blocks += [f"![{name}](data:image/png;base64,{picture})" for name, picture in seen.pictures.items()]
    blocks += ["## Samples", *map(_sample, seen.samples)]
    return _fitting(blocks, "Shortened here.")


def _fitting(blocks: Iterable[str], note: str) -> str:
    kept, left = [], MARKDOWN_BYTES - len(note.encode()) - 3
    for block in blocks:
        left -= len(block.encode()) + 2
        if left < 0:
            kept.append(note)
            break
        kept.append(block)
    return "\n\n".join(kept) + "\n"


def _table(head: Sequence[str], rows: Table) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *([cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str) -> str:
    """`text` as it is: no markup of its own, no end of the cell."""
    return re.sub(r"([\\`*|\[\]])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _sample(sample: Mapping[str, Any]) -> str:
    head = f"**{cell(_short(sample['kind']))}**, turn {sample['turn']}, {cell(sample['finish_reason'])}"
    blocks = [head]
    first = next((segment for segment in sample["segments"] if segment["kind"] != "prompt"), None)
    for segment in sample["segments"]:
        marker = "▼ supervised from here: " if segment is first else ""
        blocks.append(f"{marker}{segment['kind']}, {segment['tokens']:,} tokens")
        blocks.append(fenced(segment["text"]))
    return "\n\n".join(blocks)


def fenced(text: str, language: str = "text") -> str:
    """A code block that `text` cannot end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
