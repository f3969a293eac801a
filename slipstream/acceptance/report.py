"""The run's report: figures by name (report.json), a page to look at (report.html), a short form (report.md).

`<workdir>/runs/<name>/` holds them beside links to the stage folders; `runs/latest` points to the newest.
Model text is escaped in both pages.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from slipstream import atomic
from slipstream.acceptance import plots
from slipstream.acceptance import stage as acceptance_stage
from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.drafter import curves, history
from slipstream.traces import report as traces_report

HEADLINE = (
    "acceptance_rate",
    "mean_accepted_length",
    "acceptance_per_position",
    "tokens_per_second",
    "speed_up",
    "outputs_identical",
    "verdict",
    "reason",
)


def _stage_entry(artifact: Artifact, started: datetime) -> dict[str, Any]:
    manifest = artifact.manifest()
    return {
        "seconds": manifest.seconds,
        "executed": datetime.fromisoformat(manifest.ended) >= started,
        "digest": manifest.content,
        "key": manifest.key,
        "path": artifact.path,
        "counts": manifest.counts,
        "work": manifest.work,
    }


def _span(shards: Sequence[Artifact], started: datetime) -> float:
    """Seconds on the wall from the first to the last of the shards that this run captured (they overlap)."""
    manifests = [manifest for shard in shards if (manifest := shard.manifest()).ended >= started.isoformat()]
    if not manifests:
        return 0.0
    first = min(datetime.fromisoformat(manifest.started) for manifest in manifests)
    return (max(datetime.fromisoformat(manifest.ended) for manifest in manifests) - first).total_seconds()


def collect(
    config: RunConfig, started: datetime, stages: Mapping[str, Artifact], shards: Sequence[Artifact]
) -> dict[str, Any]:
    """The content of `report.json`.

    `executed` says whether this run made the stage or found it finished; `work` is what its last execution did.
    The features entry counts its shards in: samples captured, seconds on the wall.
    """
    import json

    entries = {name: _stage_entry(artifact, started) for name, artifact in stages.items()}
    fresh = [entry for shard in shards if (entry := _stage_entry(shard, started))["executed"]]
    features = entries["features"]
    features["executed"] = features["executed"] or bool(fresh)
    features["seconds"] = round(features["seconds"] + _span(shards, started), 3)
    features["work"] = {
        **features["work"],
        "captured": sum(entry["work"]["captured"] for entry in fresh),
        "shards_executed": len(fresh),
    }
    figures = json.loads((stages["acceptance"].folder / acceptance_stage.FIGURES).read_text())
    return {
        "name": config.name,
        "started": started.isoformat(),
        **{name: figures[name] for name in HEADLINE},
        "acceptance": figures,
        "stages": entries,
        "config": config.model_dump(mode="json"),
    }


def write(config: RunConfig, started: datetime, stages: Mapping[str, Artifact], shards: Sequence[Artifact]) -> Path:
    """Writes the run's folder and returns it."""
    folder = config.root / "runs" / config.name
    folder.mkdir(parents=True, exist_ok=True)
    for name, artifact in stages.items():
        atomic.point(folder / name, artifact.folder)
    report = collect(config, started, stages, shards)
    atomic.write_json(folder / "report.json", report)
    traces = traces_report.view(stages["traces"].folder)
    pictures = _pictures(report, stages, traces)
    page = traces_report.render("acceptance/report.html", report=report, pictures=pictures, traces=traces)
    atomic.write_bytes(folder / "report.html", page.encode())
    atomic.write_bytes(folder / "report.md", _markdown(report, pictures).encode())
    atomic.point(config.root / "runs" / "latest", folder)
    return folder


def _pictures(report: Mapping[str, Any], stages: Mapping[str, Artifact], traces: traces_report.View) -> dict[str, str]:
    drawn = {
        "Acceptance by draft position": plots.acceptance(report["acceptance"]),
        "Speed": plots.speed(report["acceptance"]),
        "Training": curves.draw(history.read(stages["drafter"].folder)),
    }
    pictures = {name: base64.b64encode(png).decode() for name, png in drawn.items() if png}
    if lengths := traces.pictures.get("Trace lengths"):
        pictures["Trace lengths"] = lengths
    return pictures


def headline(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures a reader looks for first, as text."""
    speeds = report["tokens_per_second"]
    rate, length = report["acceptance_rate"], report["mean_accepted_length"]
    per_position = ", ".join(f"{value:.3f}" for value in report["acceptance_per_position"])
    rows = [
        ("acceptance rate", "n/a" if rate is None else f"{rate:.3f}"),
        ("mean accepted length", "n/a" if length is None else f"{length:.2f} tokens a step"),
        ("acceptance per position", per_position or "n/a"),
        (
            "speed-up",
            f"{report['speed_up']:.2f}x ({speeds['speculative']:.0f} against {speeds['baseline']:.0f} tokens/s)",
        ),
        (
            "outputs identical",
            "yes" if report["outputs_identical"] else f"no, {report['acceptance']['outputs_different']}",
        ),
    ]
    if floor := report["acceptance"].get("untrained"):
        rate = floor["acceptance_rate"]
        rows.append(("untrained acceptance rate", "n/a" if rate is None else f"{rate:.3f}"))
    return [*rows, ("verdict", f"{report['verdict']}: {report['reason']}")]


def _markdown(report: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    lines = [f"# {report['name']}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in headline(report)]
    lines += ["", "| stage | made in this run | seconds | folder |", "|---|---|---|---|"]
    for name, entry in report["stages"].items():
        made = "yes" if entry["executed"] else "reused"
        lines.append(f"| {name} | {made} | {entry['seconds']:.1f} | `{name}/{entry['key']}` |")
    lines += ["", *(f"![{name}](data:image/png;base64,{picture})\n" for name, picture in pictures.items())]
    return "\n".join(lines) + "\n"
