"""Files that appear whole or not at all: temporary name, fsync, rename, fsync of the folder.

A process can be killed at any instant.  What it leaves behind is a `*.tmp` file that nobody reads
and that `sweep` removes, never a half file under a final name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SUFFIX = ".tmp"


def fsync_folder(folder: Path) -> None:
    """Makes the renames inside `folder` survive a power loss."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_file(path: Path) -> None:
    """Flushes the content of `path` to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on a clean exit it is synced and becomes `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{SUFFIX}")
    try:
        yield temporary
        fsync_file(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def point(link: Path, target: Path) -> None:
    """Makes `link` a relative symbolic link to `target`, replacing an older one atomically."""
    temporary = link.with_name(f".{link.name}{SUFFIX}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, link.parent))
    os.replace(temporary, link)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data` to `path` atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as strictly valid, indented JSON (NaN raises ValueError) to `path` atomically."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    """Writes `rows` as JSON lines to `path` atomically."""
    write_bytes(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode())


def sweep(folder: Path) -> int:
    """Removes what killed writers left in `folder` (not below it); returns how many files that were."""
    leftovers = [p for p in folder.glob(f".*{SUFFIX}") if p.is_file()]
    for path in leftovers:
        path.unlink(missing_ok=True)
    return len(leftovers)
