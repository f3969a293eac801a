"""The examination of a machine."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from slipstream import doctor

PYTHON = Path(sys.executable)


def lock(folder: Path, *lines: str) -> Path:
    """A lock file."""
    path = folder / "cpu.lock"
    path.write_text("\n".join(["# made by a script", "", *lines]) + "\n")
    return path


def test_pins_are_normalised_names(tmp_path: Path) -> None:
    path = lock(tmp_path, "Foo_Bar==1.2", "# old==0", "baz==3.0  ", "-e .")
    assert doctor.pins(path) == {"foo-bar": "1.2", "baz": "3.0"}


@pytest.mark.parametrize("name", ["train", "serve"])
def test_the_locks_that_ship_here_are_read(root: Path, name: str) -> None:
    path = root / "infra" / name / "cpu.lock"
    pinned = doctor.pins(path)
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert len(pinned) == len(lines)
    assert pinned["torch"] == "2.13.0"
    assert all(version[0].isdigit() and " " not in version for version in pinned.values())


def test_a_matching_environment(tmp_path: Path) -> None:
    version = importlib.metadata.version("numpy")
    finding = doctor.environment("train", PYTHON, lock(tmp_path, f"numpy=={version}"))
    assert finding == doctor.Finding("train", "1 packages as pinned", "")


def test_other_and_missing_packages_are_named(tmp_path: Path) -> None:
    version = importlib.metadata.version("numpy")
    finding = doctor.environment("train", PYTHON, lock(tmp_path, "numpy==0.1", "not-there==2.0"))
    assert finding.state == f"2 of 2 packages differ: numpy {version} (pinned 0.1), not-there missing (pinned 2.0)"
    assert finding.advice == "run `make install`"


def test_no_more_than_three_are_named(tmp_path: Path) -> None:
    finding = doctor.environment("train", PYTHON, lock(tmp_path, *(f"not-there-{i}==1" for i in range(9))))
    assert finding.state.startswith("9 of 9 packages differ: ")
    assert finding.state.count("missing") == 3


def test_a_missing_environment_or_lock(tmp_path: Path) -> None:
    nowhere = doctor.environment("serve", tmp_path / "python", lock(tmp_path, "a==1"))
    assert (nowhere.state, nowhere.advice) == (f"{tmp_path / 'python'} is missing", "run `make install`")
    assert "is missing" in doctor.environment("serve", PYTHON, tmp_path / "no.lock").state


def test_the_local_part_of_a_version_is_left_out() -> None:
    assert doctor.installed(PYTHON)["torch"] == importlib.metadata.version("torch").split("+")[0]


@pytest.mark.parametrize(("free", "well"), [(11e9, True), (1e9, False)])
def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, well: bool) -> None:
    monkeypatch.setattr(doctor, "free_bytes", lambda path: int(free))
    disk = next(finding for finding in doctor.examine(tmp_path, tmp_path) if finding.what == "disk")
    assert disk.state == f"{free / 1e9:.0f} GB free for {tmp_path}"
    assert (disk.advice == "") == well
