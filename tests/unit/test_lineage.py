"""What an artifact was made from, by the contents that manifests name."""

from __future__ import annotations

import shutil
from pathlib import Path

from slipstream.artifact import Artifact, claim
from slipstream.lineage import lineage


def make(root: Path, stage: str, key: str, inputs: dict[str, str], parts: dict[str, str] | None = None) -> Artifact:
    """A finished folder whose content is `<stage>-<key>`."""
    with claim(root, stage, key) as folder:
        (folder.path / "out").write_text(key)
        content = f"{stage}-{key}"
        return folder.commit(version=1, recipe={}, inputs=inputs, content=content, files=["out"], parts=parts)


def test_inputs_are_found_by_content_or_by_a_part_of_it(tmp_path: Path) -> None:
    make(tmp_path, "prompts", "other", {}, {"traced": "another"})
    prompts = make(tmp_path, "prompts", "p", {}, {"traced": "the traced part"})
    traces = make(tmp_path, "traces", "t", {"prompts": "the traced part"})
    make(tmp_path, "traces", "u", {"prompts": "another"})
    features = make(tmp_path, "features", "f", {"traces": "traces-t", "rows": "no stage of ours"})
    assert lineage(features) == [prompts, traces, features]
    assert lineage(prompts) == [prompts]


def test_of_several_the_newest_and_none_that_is_gone(tmp_path: Path) -> None:
    make(tmp_path, "prompts", "a", {}, {"traced": "same"})
    newer = make(tmp_path, "prompts", "b", {}, {"traced": "same"})
    older = make(tmp_path, "prompts", "0", {}, {"traced": "elsewhere"})
    traces = make(tmp_path, "traces", "t", {"prompts": "same"})
    assert lineage(traces) == [newer, traces]
    for folder in (older.folder, newer.folder):
        shutil.rmtree(folder)
    (tmp_path / "prompts" / "a" / "manifest.json").write_text("{")
    assert lineage(traces) == [traces]
