"""Publishing: what would go up, what arrives at the Hub, and its refusals as one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from slipstream import cli, publish
from slipstream.drafter import export
from slipstream.drafter.source import Source
from slipstream.errors import Damaged, InputError
from tests.fake_hub import FakeHub
from tests.unit.drafter import tiny

ROOT = Path(__file__).parents[2]
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """A drafter's checkpoint whose config names its verifier by a folder."""
    return tiny.save(tmp_path / "drafter")


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit status of `slipstream …`."""
    monkeypatch.setattr(sys, "argv", ["slipstream", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_without_push_it_shows_and_uploads_nothing(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPSTREAM_WORKDIR", str(tmp_path / "work"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(publish, "push", lambda *_: pytest.fail("uploaded"))
    line = ["publish", str(drafter), "--repo", "org/kimi-eagle3", "--verifier", "moonshotai/Kimi-K2.5"]
    assert command(monkeypatch, *line) == 0
    shown = capsys.readouterr().out
    for name in ("README.md", "config.json", "model.safetensors", "org/kimi-eagle3", "base_model", "--push"):
        assert name in shown
    assert list((tmp_path / "work" / "publish").iterdir()) == []


def test_nothing_that_goes_up_names_a_folder_of_this_machine(drafter: Path, tmp_path: Path) -> None:
    with publish.prepared(Source(drafter), "org/kimi-eagle3", tmp_path / "s", "speculators") as ready:
        texts = (ready.folder / "README.md").read_text() + (ready.folder / "config.json").read_text()
        assert "/nowhere" not in texts
        assert str(tmp_path) not in texts
        config = json.loads((ready.folder / "config.json").read_text())
        assert config["speculators_config"]["verifier"]["name_or_path"] == "Kimi"


def test_the_card_names_repository_and_base_model(drafter: Path, tmp_path: Path) -> None:
    with publish.prepared(Source(drafter), "org/k-eagle3", tmp_path / "s", verifier="moonshotai/Kimi-K2.5") as ready:
        card = ModelCard.load(ready.folder / "README.md")
        assert card.data.base_model == "moonshotai/Kimi-K2.5"
        assert "eagle3" in card.data.tags
        assert '"model": "org/k-eagle3"' in card.text
        assert "--model moonshotai/Kimi-K2.5 " in card.text


@pytest.mark.parametrize("name", ["kimi", "org/", "/x", "org/a/b", "org/a b", "../x/y", "http://h/org/x"])
def test_a_repository_is_org_and_name(drafter: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="org/name"), publish.prepared(Source(drafter), name, tmp_path / "s"):
        pass


def test_what_is_no_drafter_or_is_damaged_is_refused(drafter: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with (
        pytest.raises(InputError, match="what drafter this is"),
        publish.prepared(Source(tmp_path / "empty"), "o/n", tmp_path),
    ):
        pass
    whole = (drafter / "model.safetensors").read_bytes()
    (drafter / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="safetensors"), publish.prepared(Source(drafter), "o/n", tmp_path):
        pass
    tiny.save(drafter, tensors=tiny.tensors(d2t=tiny.D2T + 1))
    with pytest.raises(Damaged, match="OFFSET"), publish.prepared(Source(drafter), "o/n", tmp_path):
        pass


def test_no_token_no_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(InputError, match="HF_TOKEN"):
        publish.push(publish.Prepared(tmp_path, "org/name"))


def test_offline_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests run with HF_HUB_OFFLINE=1."""
    monkeypatch.setenv("HF_TOKEN", "writes")
    with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
        publish.push(publish.Prepared(tmp_path, "org/name"))


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> tuple[FakeHub, Path, dict[str, Any]]:
    """A hub after one upload with every kind of token, the folder that went up, and what the uploader was told."""
    folder = tmp_path_factory.mktemp("published")
    source = tiny.save(folder / "checkpoint")
    export.write(export.opened.read(source), folder / "flat", "flat", "float32", name="org/kimi-eagle3")
    environment = {name: value for name, value in os.environ.items() if name not in OFFLINE}
    with FakeHub() as hub:
        environment |= {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(folder / "home"),
            "PYTHONPATH": str(ROOT),
            "NO_PROXY": "127.0.0.1",
        }
        line = [sys.executable, str(ROOT / "tests/unit/publish_driver.py"), str(folder / "flat"), "org/kimi-eagle3"]
        line += ["writes", "reads", "strangers", "early", "unknown", "away"]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return hub, folder / "flat", json.loads(done.stdout.splitlines()[-1])


def test_what_arrives_are_the_folders_bytes(pushed: tuple[FakeHub, Path, dict[str, Any]]) -> None:
    hub, folder, told = pushed
    assert hub.repositories.keys() == {"org/kimi-eagle3"}
    assert hub.repositories["org/kimi-eagle3"] == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert told["writes"] == f"{hub.url}/org/kimi-eagle3/commit/{'a' * 40}"
    assert hub.created[0].items() >= {"name": "kimi-eagle3", "organization": "org", "visibility": "private"}.items()


@pytest.mark.parametrize(
    ("token", "says"),
    [
        ("unknown", "InputError: org/kimi-eagle3: the Hub answers 401: it does not know the token in HF_TOKEN"),
        ("reads", "InputError: org/kimi-eagle3: the Hub answers 403: the token in HF_TOKEN may not write there"),
        ("strangers", "InputError: org/kimi-eagle3: the Hub answers 404: no such repository"),
        ("early", "TransientError: org/kimi-eagle3: the Hub answers 503: as this token has it"),
    ],
)
def test_refusals_are_one_sentence_without_the_token(
    pushed: tuple[FakeHub, Path, dict[str, Any]], token: str, says: str
) -> None:
    told = pushed[2][token]
    assert told.startswith(says)
    assert "\n" not in told
    assert f" {token}" not in told
    assert token in pushed[0].tokens, "this token never reached the Hub"


def test_a_hub_that_is_away_is_one_sentence(pushed: tuple[FakeHub, Path, dict[str, Any]]) -> None:
    """The HTTP client's own errors are no OSError."""
    assert pushed[2]["away"].startswith("TransientError: org/kimi-eagle3: the upload broke off (")


def test_a_token_that_no_header_takes_is_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """h11 would say: Illegal header value b'Bearer hf_…'."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret\rand more")
    with pytest.raises(InputError, match="HF_TOKEN: holds a blank") as raised:
        publish.push(publish.Prepared(tmp_path, "org/name"))
    assert "secret" not in str(raised.value)


def test_front_matter_is_valid_whatever_people_call_things(tmp_path: Path) -> None:
    config = tiny.config()
    config["speculators_config"]["verifier"]["name_or_path"] = 'evil: "name"\n---\n<script>'
    checkpoint = tiny.save(tmp_path / "c", config)
    with publish.prepared(Source(checkpoint), "org/name", tmp_path / "s") as ready:
        front = yaml.safe_load(ready.text.split("---\n")[1])
        assert "base_model" not in front
        assert "<script>" not in ready.text.split("```")[0]
        assert load_file(ready.folder / "model.safetensors")["d2t"].tolist() == [0, 0, 0, 2]
