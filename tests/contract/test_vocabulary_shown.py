"""What Prefect shows of a draft vocabulary and of a warm start, read back through its API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from slipstream.artifact import Artifact, claim
from slipstream.drafter import stage, warm_start
from slipstream.drafter.warm_start import Fate
from slipstream.vocabulary import report
from tasks.drafter import train
from tasks.vocabulary import choose_vocabulary
from tests.contract.capturing import configuration, traces_of
from tests.contract.test_features_shown import shown

pytestmark = pytest.mark.usefixtures("results")


def test_a_page_of_coverage_and_a_table_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = configuration(tmp_path / "work", {}, shards=1)
    words = given.vocabulary.model_copy(update={"size": 60, "sweep": [30, 90]})
    config = given.model_copy(update={"vocabulary": words})
    none = Artifact(path=str(tmp_path), stage="s", key="k", content="c")

    def run(workdir: Path, *given: Any, **more: Any) -> Artifact:
        """The stage, its warm start written by hand."""
        with claim(workdir, "drafter", "k") as folder:
            warm_start.record([Fate("fc.weight", [8, 24], "taken"), Fate("d2t", [5], "fresh", "new")], folder.path)
            counts = {"best_epoch": "0", "accepted_length": {}}
            return folder.commit(version=1, recipe={}, inputs={}, content="c", files=[warm_start.FILE], counts=counts)

    monkeypatch.setattr(stage, "run", run)
    monkeypatch.setattr(stage, "key", lambda *_: "k")

    @flow(persist_result=False)
    def both() -> Artifact:
        made = choose_vocabulary(config, traces_of(config, 8))
        train(config, none, none)
        return made

    made = both()
    artifacts = shown("vocabulary-coverage", "vocabulary", "drafter-warm-start")
    page = artifacts["vocabulary-coverage"].data
    assert page == report.markdown(made.folder)
    assert "](data:image/png;base64,iVBOR" in page
    assert "| 90 | 100.00% | 100.00% |" in page
    assert len(page) < 100_000
    assert '"fc.weight"' in str(artifacts["drafter-warm-start"].data).replace("'", '"')
