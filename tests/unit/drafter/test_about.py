"""What is known of a drafter before training: by name, never by a path of this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.artifact import Artifact, claim
from slipstream.config import RunConfig
from slipstream.drafter.about import about, published_license


def made(workdir: Path, stage: str, inputs: dict[str, str], **counts: object) -> Artifact:
    """A finished folder of a stage that holds nothing but counts."""
    with claim(workdir, stage, "k") as folder:
        return folder.commit(version=1, recipe={}, inputs=inputs, content=stage, files=[], counts=counts)


@pytest.fixture
def finished(tmp_path: Path) -> tuple[Artifact, Artifact]:
    """Features and vocabulary of a run, with the prompts and traces before them."""
    made(tmp_path, "prompts", {}, sources={"0": {"used": 12}})
    made(tmp_path, "traces", {"prompts": "prompts"}, rows=11)
    features = made(tmp_path, "features", {"traces": "traces"}, train=8, validation=3, tokens=900)
    words = made(tmp_path, "vocabulary", {"traces": "traces"}, size=320, target_size=512, coverage_validation=0.97)
    return features, words


def test_data_and_mapping_come_from_the_artifacts(
    make_config: Callable[..., RunConfig], finished: tuple[Artifact, Artifact]
) -> None:
    found = about(make_config(), *finished)
    assert found["data"]["sources"] == [{"name": "prompts.jsonl", "used": 12}]
    assert [found["data"][name] for name in ("train", "validation", "tokens")] == [8, 3, 900]
    assert [found["mapping"][name] for name in ("size", "coverage_validation")] == [320, 0.97]
    assert found["shape"]["head_dim"] == 32
    assert found["verifier"]["num_layers"] == 6


def test_no_path_of_this_machine_is_told(
    make_config: Callable[..., RunConfig], finished: tuple[Artifact, Artifact], tmp_path: Path
) -> None:
    config = make_config(
        prompts={"sources": [{"path": str(tmp_path / "mine.jsonl")}, {"path": "org/public"}]},
        drafter={"init_from": str(tmp_path / "published-drafter")},
        servers={"extra_args": ["--chat-template", str(tmp_path / "t.jinja"), "--api-key", "secret"]},
    )
    told = json.dumps(found := about(config, *finished))
    assert [source["name"] for source in found["data"]["sources"]] == ["mine.jsonl", "org/public"]
    assert found["training"]["init_from"] == "published-drafter"
    for hidden in (str(tmp_path), str(Path(config.verifier.path).parent), "secret"):
        assert hidden not in told


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("---\nlicense: mit\n---\n# Model\n", "mit"),
        ("---\nlicense: [a, b]\n---\n", None),
        ("---\n: : :\n---\n", None),
        ("# no front matter\nlicense: mit\n", None),
        (None, None),
    ],
)
def test_the_license_is_what_the_verifiers_card_says(tmp_path: Path, card: str | None, expected: str | None) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert published_license(tmp_path) == expected
