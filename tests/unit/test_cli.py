"""The command line: exit status and one sentence an error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream import cli, plan
from slipstream.artifact import claim

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Main:
    """Runs the command in this process; exit status, stdout and stderr."""
    monkeypatch.setenv("SLIPSTREAM_WORKDIR", str(tmp_path / "work"))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["slipstream", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished stage folder with one file of three bytes."""
    with claim(tmp_path, "stage", "key") as made:
        (made.path / "a").write_bytes(b"abc")
        made.commit(version=1, recipe={}, inputs={}, content="c", files=["a"])
    return tmp_path / "stage" / "key"


def write(folder: Path, values: dict[str, Any]) -> str:
    """A configuration file."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def one_sentence(error: str) -> str:
    """The error without its line end; fails when there are several lines or a traceback."""
    assert error.startswith("slipstream: ")
    assert error.count("\n") == 1
    return error.strip()


def test_an_intact_folder(main: Main, folder: Path) -> None:
    status, out, _ = main("verify", str(folder))
    assert (status, out) == (0, f"{folder}: 1 files intact (existence and size)\n")
    assert main("verify", "--deep", str(folder))[:2] == (0, f"{folder}: 1 files intact (checksums)\n")


def test_a_flipped_byte_is_found_by_deep_only(main: Main, folder: Path) -> None:
    (folder / "a").write_bytes(b"abd")
    assert main("verify", str(folder))[0] == 0
    status, out, _ = main("verify", str(folder), "--deep", "--keep")
    assert (status, out) == (1, f"a: checksum differs\n{folder}: 1 of 1 files damaged\n")
    assert (folder / "a").read_bytes() == b"abd"


def test_what_deep_finds_is_set_aside_for_the_next_run(main: Main, folder: Path) -> None:
    (folder / "a").write_bytes(b"abd")
    status, out, _ = main("verify", str(folder), "--deep")
    aside = folder.parent.parent / "quarantine" / folder.parent.name / folder.name
    assert status == 1
    assert f"set aside under {aside}" in out
    assert (aside / "a").read_bytes() == b"abd"
    assert main("verify", str(folder))[1].startswith("a: 0 bytes instead of 3")


@pytest.mark.parametrize(("content", "reason"), [(None, "missing"), (b"", "0 bytes instead of 3")])
def test_a_damaged_folder(main: Main, folder: Path, content: bytes | None, reason: str) -> None:
    (folder / "a").unlink()
    if content is not None:
        (folder / "a").write_bytes(content)
    status, out, _ = main("verify", str(folder))
    assert status == 1
    assert out.splitlines()[0] == f"a: {reason}"


def test_an_unreadable_manifest(main: Main, folder: Path) -> None:
    (folder / "manifest.json").write_text("{")
    status, _, err = main("verify", str(folder))
    assert status == 1
    assert "unreadable manifest" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_what_is_no_artifact(main: Main, tmp_path: Path, name: str) -> None:
    status, _, err = main("verify", str(tmp_path / name))
    assert status == 2
    assert "not an artifact" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_missing_configuration(main: Main, tmp_path: Path, command: str) -> None:
    status, out, err = main(command, str(tmp_path / "no.yaml"))
    assert (status, out) == (2, "")
    assert "no.yaml: cannot read the configuration" in one_sentence(err)


@pytest.mark.parametrize("command", ["run", "plan"])
def test_an_unknown_key(main: Main, tmp_path: Path, values: dict[str, Any], command: str) -> None:
    status, _, err = main(command, write(tmp_path, values | {"epochs": 3}))
    assert status == 2
    assert "unknown key `epochs`" in one_sentence(err)


@pytest.mark.parametrize(
    ("section", "fields", "words"),
    [
        ("features", {"layer_ids": [6]}, "6 is the final state"),
        ("vocabulary", {"size": 9999}, "9999"),
        ("verifier", {"path": "nowhere"}, "nowhere"),
        ("prompts", {"sources": [{"path": "missing.jsonl"}]}, "missing.jsonl"),
        ("servers", {"python": "no-such-python"}, "no-such-python"),
        ("drafter", {"init_from": "no-checkpoint"}, "no-checkpoint"),
    ],
)
def test_a_run_that_cannot_start_starts_nothing(
    main: Main,
    tmp_path: Path,
    values: dict[str, Any],
    write_prompts: Callable[..., str],
    section: str,
    fields: dict[str, Any],
    words: str,
) -> None:
    values["prompts"]["sources"] = [{"path": write_prompts([f"p {i}" for i in range(20)])}]
    values["servers"]["python"] = sys.executable
    values[section] |= fields
    status, out, err = main("run", write(tmp_path, values))
    assert (status, out) == (2, "")
    assert words in one_sentence(err)
    assert not (tmp_path / "work").exists()


def test_a_run_that_does_not_fit(
    main: Main,
    tmp_path: Path,
    values: dict[str, Any],
    write_prompts: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "free_bytes", lambda path: 1000)
    values["prompts"]["sources"] = [{"path": write_prompts(["a", "b", "c", "d"])}]
    values["servers"]["python"] = sys.executable
    status, _, err = main("run", write(tmp_path, values))
    assert status == 2
    assert "does not fit here" in one_sentence(err)


def test_plan_as_text_and_json(main: Main, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    status, out, _ = main("plan", "deployments/kimi-k2.5-8gpu.yaml")
    assert status == 0
    assert "14,440,000" in out
    assert "57,344 bytes a token" in out
    assert "828.0 GB" in out
    status, out, _ = main("plan", "deployments/kimi-k2.5-8gpu.yaml", "--json")
    assert (status, json.loads(out)["bytes_per_token"]) == (0, 57344)


def test_report_of_nothing(main: Main) -> None:
    status, _, err = main("report")
    assert status == 2
    assert "known runs are none" in one_sentence(err)


def test_report_of_a_run(main: Main, tmp_path: Path) -> None:
    folder = tmp_path / "work" / "runs" / "mine"
    folder.mkdir(parents=True)
    figures = {"tokens_per_second": {"baseline": 1, "speculative": 2}, "acceptance_rate": 0.5, "speed_up": 2.0}
    figures |= {"mean_accepted_length": 2.5, "acceptance_per_position": [0.5], "outputs_identical": True}
    report = figures | {"acceptance": figures, "verdict": "accepted", "reason": "fast"}
    (folder / "report.json").write_text(json.dumps(report))
    for argument in ("mine", str(folder)):
        status, out, _ = main("report", argument)
        assert status == 0
        assert "acceptance rate            0.500" in out
        assert "accepted: fast" in out
    assert main("report", "other")[0] == 2


@pytest.mark.parametrize("arguments", [[], ["fly"], ["run"], ["plan", "a", "b"]])
def test_wrong_usage(main: Main, arguments: list[str]) -> None:
    assert main(*arguments)[0] == 2


def test_an_error_of_a_stage_is_status_1(main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream import config
    from slipstream.errors import StageFailed

    def fail(path: Path) -> None:
        raise StageFailed("traces: 3 of 4 prompts have no usable trace")

    monkeypatch.setattr(config, "load_config", fail)
    status, _, err = main("plan", "x.yaml")
    assert (status, one_sentence(err)) == (1, "slipstream: traces: 3 of 4 prompts have no usable trace")


def test_the_module_is_a_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.cli", "verify", str(tmp_path)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "not an artifact" in done.stderr
    assert "Traceback" not in done.stderr
