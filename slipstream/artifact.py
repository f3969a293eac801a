"""Stage outputs: folders keyed by what made them, complete exactly when their manifest exists.

A stage writes `<workdir>/<stage>/<key>/`.

* `key` names what made it: stage, stage version, the stage's recipe, the `content` of its inputs.
* `content` names what the next stage reads, without reports, logs and times.  So the same inputs find
  the same folder, a repaired file changes nothing after it, and other rows make all after them new.
  `parts` does the same for pieces that different stages read.
* `manifest.json` is written last, with a temporary name, fsync and rename.  It lists every file with
  its size and XXH3-128 checksum.
* A writer holds an `flock` on the folder: a second run on the same key waits; a kill -9 frees it.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from slipstream import atomic
from slipstream.digest import digest
from slipstream.errors import Damaged

MANIFEST = "manifest.json"
LOCK = ".lock"
SCHEMA = 1
READ_BYTES = 1 << 20  # hashed while it is in the core's cache
TOOLS = ("slipstream", "prefect", "torch", "transformers", "speculators", "safetensors", "openai", "pyarrow")


_buffers = threading.local()


class FileRecord(BaseModel):
    """One file of an artifact: size in bytes and XXH3-128 of its content, hexadecimal."""

    model_config = ConfigDict(frozen=True)
    size: int
    checksum: str


class Manifest(BaseModel):
    """What `manifest.json` holds."""

    schema_version: int = SCHEMA
    stage: str
    stage_version: int
    key: str
    content: str
    parts: dict[str, str] = {}
    recipe: dict[str, Any]
    inputs: dict[str, str]
    counts: dict[str, Any] = {}
    work: dict[str, Any] = {}
    origin: dict[str, Any] = {}
    files: dict[str, FileRecord]
    tools: dict[str, str]
    started: str
    ended: str
    seconds: float


class Damage(BaseModel):
    """One file that is not as the manifest says."""

    path: str
    reason: str


class Artifact(BaseModel):
    """A finished stage folder: what tasks hand to each other."""

    model_config = ConfigDict(frozen=True)
    path: str
    stage: str
    key: str
    content: str
    parts: dict[str, str] = {}

    @property
    def folder(self) -> Path:
        """The stage folder."""
        return Path(self.path)

    def manifest(self) -> Manifest:
        """The manifest; raises Damaged when it is gone or unreadable."""
        return read_manifest(self.folder)

    def verify(self, deep: bool = False) -> list[Damage]:
        """What is wrong with the folder (see `verify`); a missing manifest is one damage."""
        try:
            return verify(self.folder, deep=deep)
        except Damaged as error:
            return [Damage(path=MANIFEST, reason=str(error))]


def stage_key(stage: str, version: int, recipe: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """The key of a stage folder: 32 hex digits over everything that can change its content."""
    return digest({"stage": stage, "version": version, "recipe": dict(recipe), "inputs": dict(inputs)})


def checksum(path: Path) -> str:
    """XXH3-128 of the file's bytes, 32 hex digits (https://xxhash.com, the 128-bit variant).

    Each thread reads into one buffer of its own: fresh memory for every piece took a third of the time.
    """
    hasher = xxhash.xxh3_128()
    if not hasattr(_buffers, "mine"):
        _buffers.mine = memoryview(bytearray(READ_BYTES))
    buffer = _buffers.mine
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return str(hasher.hexdigest())


def file_record(path: Path) -> FileRecord:
    """Size and checksum of a file, read from the disk."""
    return FileRecord(size=path.stat().st_size, checksum=checksum(path))


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`; raises Damaged when there is none or it does not parse."""
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{folder}: no {MANIFEST}, so this folder is not a finished artifact") from None
    except (ValidationError, OSError) as error:
        raise Damaged(f"{path}: unreadable manifest ({str(error).splitlines()[0]}); delete it and run again") from error


def open_artifact(folder: Path) -> Artifact:
    """The artifact in `folder`; raises Damaged when there is none."""
    manifest = read_manifest(folder)
    return Artifact(
        path=str(folder), stage=manifest.stage, key=manifest.key, content=manifest.content, parts=manifest.parts
    )


def _damage(folder: Path, name: str, record: FileRecord, deep: bool) -> Damage | None:
    path = folder / name
    try:
        size = path.stat().st_size
        if size != record.size:
            return Damage(path=name, reason=f"{size} bytes instead of {record.size}")
        if deep and checksum(path) != record.checksum:
            return Damage(path=name, reason="checksum differs")
    except FileNotFoundError:
        return Damage(path=name, reason="missing")
    except OSError as error:
        return Damage(path=name, reason=f"unreadable ({error.strerror})")
    return None


def verify(folder: Path, deep: bool = False, on_file: Callable[[int, int], None] | None = None) -> list[Damage]:
    """Compares `folder` with its manifest: existence and size, with `deep` also checksums.

    `on_file(done, total)` is called after each file.  Raises Damaged when there is no manifest.
    """
    files = read_manifest(folder).files
    found: list[Damage] = []
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1) if deep else 1) as pool:
        checks = pool.map(lambda item: _damage(folder, item[0], item[1], deep), files.items())
        for done, damage in enumerate(checks, 1):
            if damage is not None:
                found.append(damage)
            if on_file is not None:
                on_file(done, len(files))
    return found


def quarantine(folder: Path, damage: Sequence[Damage]) -> Path:
    """Sets damaged files of an artifact aside, so that the next run makes them again, alone; returns where.

    The damaged bytes are kept as `<workdir>/quarantine/<stage>/<key>/<name>`.  The file itself is emptied in place, not
    moved: other names of it (the row pool's, other artifacts') are the same damaged bytes, and the cheap verification
    must find all of them.
    """
    aside = folder.parent.parent / "quarantine" / folder.parent.name / folder.name
    for item in damage:
        source = folder / item.path
        if not source.is_file():
            continue
        kept = aside / "/".join(part for part in Path(item.path).parts if part != "..")
        if source.stat().st_size:
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, kept)
            atomic.fsync_file(kept)
        os.truncate(source, 0)
        atomic.fsync_file(source)
    return aside


def find(workdir: Path, stage: str, key: str) -> Artifact | None:
    """The artifact of this key when it is there and passes the cheap verification, else None."""
    folder = workdir / stage / key
    try:
        artifact = open_artifact(folder)
    except Damaged:
        return None
    return None if artifact.verify() else artifact


class StageFolder:
    """A stage folder while it is being written; made by `claim`, finished by `commit`."""

    def __init__(self, path: Path, stage: str, key: str) -> None:
        self.path, self.stage, self.key = path, stage, key
        self.started = datetime.now(UTC)
        self._clock = time.monotonic()

    def complete(self) -> Artifact | None:
        """The finished artifact when another writer was faster, else None."""
        return find(self.path.parent.parent, self.stage, self.key)

    def reopen(self) -> None:
        """Takes the manifest away: from here on the folder is unfinished until `commit`."""
        atomic.sweep(self.path)
        (self.path / MANIFEST).unlink(missing_ok=True)

    def commit(
        self,
        *,
        version: int,
        recipe: Mapping[str, Any],
        inputs: Mapping[str, str],
        content: str,
        files: Sequence[str] | Mapping[str, FileRecord | None],
        parts: Mapping[str, str] | None = None,
        counts: Mapping[str, Any] | None = None,
        work: Mapping[str, Any] | None = None,
        origin: Mapping[str, Any] | None = None,
    ) -> Artifact:
        """Writes the manifest and so finishes the folder.

        `files` are paths relative to the folder; a FileRecord that is already known spares reading the file again, and
        a file outside the folder needs one and must be on the disk already.  `counts` say what the artifact holds,
        `work` what this execution did for it, `origin` whose it is, in names that people know.
        """
        known = dict(files) if isinstance(files, Mapping) else dict.fromkeys(files)
        records: dict[str, FileRecord] = {}
        for name, record in sorted(known.items()):
            if record is None:
                atomic.fsync_file(self.path / name)
            records[name] = record or file_record(self.path / name)
        inside = {name for name in records if ".." not in Path(name).parts}  # whoever lists others has synced them
        for folder in sorted({(self.path / name).parent for name in inside}):
            atomic.fsync_folder(folder)
        manifest = Manifest(
            stage=self.stage,
            stage_version=version,
            key=self.key,
            content=content,
            parts=dict(parts or {}),
            recipe=dict(recipe),
            inputs=dict(inputs),
            counts=dict(counts or {}),
            work=dict(work or {}),
            origin=dict(origin or {}),
            files=records,
            tools=tool_versions(),
            started=self.started.isoformat(),
            ended=datetime.now(UTC).isoformat(),
            seconds=round(time.monotonic() - self._clock, 3),
        )
        atomic.write_json(self.path / MANIFEST, manifest.model_dump(mode="json"))
        return open_artifact(self.path)


@contextmanager
def claim(workdir: Path, stage: str, key: str, on_wait: Callable[[str], None] | None = None) -> Iterator[StageFolder]:
    """Holds the folder `<workdir>/<stage>/<key>/` for writing; waits while another process holds it."""
    folder = workdir / stage / key
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK, on_wait):
        yield StageFolder(folder, stage, key)


@contextmanager
def locked(path: Path, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """An exclusive `flock` on `path`; the kernel frees it when the process dies in any way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait(f"another run is writing {path.parent}; waiting for it")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def tool_versions() -> dict[str, str]:
    """Versions of the packages that shape the outputs, as installed here."""
    versions = {}
    for name in TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
