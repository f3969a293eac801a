"""The run's report: figures as text, model text escaped, links."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from slipstream import atomic
from slipstream.acceptance import report
from slipstream.artifact import Artifact, claim
from slipstream.config import RunConfig
from slipstream.traces.summary import Summary
from slipstream.traces.trace import Trace

EVIL = '</pre><script>alert("x")</script><img src=x onerror=alert(1)>{{ 7 * 7 }}'
FIGURES: dict[str, Any] = {
    "acceptance_rate": 0.66666,
    "mean_accepted_length": 3.0,
    "acceptance_per_position": [0.8, 0.7, 0.5],
    "tokens_per_second": {"baseline": 100.0, "speculative": 160.0},
    "speed_up": 1.6,
    "outputs_identical": True,
    "outputs_different": 0,
    "verdict": "accepted",
    "reason": "3.00 tokens a step, 1.60x the speed without it",
    "prompts": 7,
}


def run_report(**changes: Any) -> dict[str, Any]:
    """The content of report.json, as far as the headline reads it."""
    figures = FIGURES | changes
    return {**figures, "acceptance": figures}


def test_headline() -> None:
    rows = dict(report.headline(run_report()))
    assert rows["acceptance rate"] == "0.667"
    assert rows["mean accepted length"] == "3.00 tokens a step"
    assert rows["acceptance per position"] == "0.800, 0.700, 0.500"
    assert rows["speed-up"] == "1.60x (160 against 100 tokens/s)"
    assert rows["outputs identical"] == "yes"
    assert rows["verdict"] == "accepted: 3.00 tokens a step, 1.60x the speed without it"


def test_headline_of_a_drafter_that_was_not_used() -> None:
    nothing = {"acceptance_rate": None, "mean_accepted_length": None, "acceptance_per_position": []}
    rows = dict(report.headline(run_report(**nothing)))
    assert [rows[name] for name in ("acceptance rate", "mean accepted length", "acceptance per position")] == [
        "n/a"
    ] * 3


def test_headline_counts_other_outputs() -> None:
    rows = dict(report.headline(run_report(outputs_identical=False, outputs_different=4)))
    assert rows["outputs identical"] == "no, 4"


@pytest.mark.parametrize(("rate", "text"), [(0.05, "0.050"), (None, "n/a")])
def test_headline_of_the_floor(rate: float | None, text: str) -> None:
    floor = {"acceptance_rate": rate, "mean_accepted_length": None, "acceptance_per_position": []}
    assert dict(report.headline(run_report(untrained=floor)))["untrained acceptance rate"] == text


def stage_folder(workdir: Path, stage: str, write: Callable[[Path], list[str]], counts: dict[str, Any]) -> Artifact:
    """A finished stage."""
    with claim(workdir, stage, "k" * 32) as folder:
        files = write(folder.path)
        return folder.commit(version=1, recipe={}, inputs={}, content=stage, files=files, counts=counts)


def summary() -> dict[str, Any]:
    """A traces summary with one domain, whose name tries to break out as well."""
    made = Summary()
    made.accept(EVIL, Trace("k", (1, 2), (3, 4, 5), "stop", None, None), 1, True)
    return {**made.figures(), "splits": {"train": 1, "validation": 0}, "execution": None}


@pytest.fixture
def stages(tmp_path: Path) -> dict[str, Artifact]:
    """Finished stages whose traces try to break out of the page."""

    def traces(folder: Path) -> list[str]:
        segments = [{"kind": kind, "text": EVIL, "tokens": 7} for kind in ("prompt", "thinking", "answer")]
        sample = {"key": "k", "kind": EVIL, "turn": 0, "finish_reason": "stop", "segments": segments}
        (folder / "samples.json").write_text(json.dumps([sample, sample | {"segments": segments[:2]}]))
        (folder / "summary.json").write_text(json.dumps(summary()))
        return ["samples.json", "summary.json"]

    def figures(folder: Path) -> list[str]:
        (folder / "acceptance.json").write_text(json.dumps(FIGURES))
        return ["acceptance.json"]

    def nothing(folder: Path) -> list[str]:
        return []

    write = {"traces": traces, "acceptance": figures}
    names = ("prompts", "traces", "features", "vocabulary", "drafter", "acceptance")
    return {name: stage_folder(tmp_path / "work", name, write.get(name, nothing), {"what": EVIL}) for name in names}


class Tags(HTMLParser):
    """Which elements a page really has: the text of <pre> blocks and table cells, links, names of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []
        self.pre: list[str] = []
        self.cells: list[str] = []
        self.links: list[str] = []
        self.pictures: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        if tag == "pre":
            self.pre.append("")
        self.links += [value for name, value in attrs if name == "href"]
        self.pictures += [value for name, value in attrs if name == "alt"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "pre" in self.open:
            self.pre[-1] += data
        elif self.open[-1:] == ["td"]:
            self.cells.append(data)


def write(config: RunConfig, stages: dict[str, Artifact]) -> Path:
    """Writes the report of a run that began long ago."""
    return report.write(config, datetime(2020, 1, 1, tzinfo=UTC), stages, [])


def test_model_text_is_escaped(
    make_config: Callable[..., RunConfig], stages: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_pictures", lambda *_: {})
    page = Tags()
    page.feed((write(make_config(), stages) / "report.html").read_text())
    assert not {"script", "img"} & set(page.seen)
    assert len(page.pre) == 2
    assert page.pre[0].count(EVIL) == 3
    assert page.pre[1].count(EVIL) == 2
    assert EVIL in page.cells
    assert not page.open


def test_the_traces_have_their_own_page(make_config: Callable[..., RunConfig], stages: dict[str, Artifact]) -> None:
    page = Tags()
    folder = write(make_config(), stages)
    page.feed((folder / "report.html").read_text())
    (link,) = page.links
    assert link == "traces/report.html"
    assert (folder / link).parent.resolve() == stages["traces"].folder
    assert "Trace lengths" in page.pictures


def test_the_folder_and_its_links(make_config: Callable[..., RunConfig], stages: dict[str, Artifact]) -> None:
    config = make_config()
    folder = write(config, stages)
    assert folder == config.root / "runs" / "unit"
    assert (config.root / "runs" / "latest").resolve() == folder.resolve()
    for name, artifact in stages.items():
        assert not (folder / name).readlink().is_absolute()  # the work directory may move
        assert (folder / name).resolve() == artifact.folder.resolve()
    written = json.loads((folder / "report.json").read_text())
    assert written["verdict"] == "accepted"
    assert written["stages"]["traces"]["executed"] is True
    assert written["stages"]["traces"]["digest"] == "traces"
    assert RunConfig.model_validate(written["config"]) == config
    assert "data:image/png;base64," in (folder / "report.md").read_text()


def test_a_reused_stage_says_so(make_config: Callable[..., RunConfig], stages: dict[str, Artifact]) -> None:
    collected = report.collect(make_config(), datetime.now(UTC), stages, [])
    assert {entry["executed"] for entry in collected["stages"].values()} == {False}


def test_features_sum_the_shards_of_this_run(
    make_config: Callable[..., RunConfig], stages: dict[str, Artifact], tmp_path: Path
) -> None:
    shards = []
    for i, captured in enumerate((5, 7)):
        with claim(tmp_path / "work", "feature-shards", str(i)) as folder:
            work = {"captured": captured}
            shards.append(folder.commit(version=1, recipe={}, inputs={}, content="s", files=[], work=work))
    entry = report.collect(make_config(), datetime(2020, 1, 1, tzinfo=UTC), stages, shards)["stages"]["features"]
    assert (entry["work"]["captured"], entry["work"]["shards_executed"]) == (12, 2)
    later = report.collect(make_config(), datetime.now(UTC), stages, shards)["stages"]["features"]
    assert (later["work"]["captured"], later["work"]["shards_executed"], later["executed"]) == (0, 0, False)


def test_point_replaces_an_older_link(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    atomic.point(tmp_path / "latest", tmp_path / "a")
    atomic.point(tmp_path / "latest", tmp_path / "b")
    assert (tmp_path / "latest").readlink() == Path("b")
