"""Extraction servers that the shards of one process share.

`shared(workdir, config)` opens a lane per replica; a lane's server starts when a shard first borrows it and
stays for the next one, so all shards cost one start.  A lane whose shard met an error gets a fresh server.
Outside `shared`, `lending` starts a server for the one shard that asked (a task on another host).

Endpoints that the user named make one lane together: a shard spreads over all of them, and shards take turns, so
that each server has at most `features.concurrency` requests in flight.
"""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from slipstream import serving, verifier
from slipstream.config import RunConfig
from slipstream.errors import InputError
from slipstream.features import extraction
from slipstream.features.lease import Lease, Lend
from slipstream.features.rows import dropped_tokens


class Lanes:
    """One lane a replica; each serves one shard at a time.  Logs are `<workdir>/logs/<log>-<lane>.log`."""

    def __init__(self, workdir: Path, config: RunConfig, log: str = "extraction") -> None:
        self._workdir, self._config, self._log = workdir, config, log
        named = config.servers.features_endpoints
        self._free: queue.Queue[int] = queue.Queue()
        for lane in range(1 if named else config.servers.replicas):
            self._free.put(lane)
        self._open: dict[int, tuple[ExitStack, Lease]] = {}

    @contextmanager
    def borrow(self) -> Iterator[Lease]:
        """A lane's server; waits for a free lane."""
        lane = self._free.get()
        try:
            if lane not in self._open:
                stack = ExitStack()
                self._open[lane] = (stack, stack.enter_context(self._start(lane)))
            yield self._open[lane][1]
        except BaseException:
            self._close(lane)
            raise
        finally:
            self._free.put(lane)

    @contextmanager
    def _start(self, lane: int) -> Iterator[Lease]:
        config, servers = self._config, self._config.servers
        if servers.features_endpoints:
            storage = Path(str(servers.features_storage))
            check_storage(storage)
            first, *others = serving.connect_any(servers.features_endpoints)
            yield Lease(first, storage, others=tuple(others))
            return
        storage = storage_folder(self._workdir, lane)
        storage.mkdir(parents=True, exist_ok=True)
        try:
            wanted, log = spec(config, storage), self._workdir / "logs" / f"{self._log}-{lane}.log"
            gpus, cache = serving.visible_gpus(servers, lane), serving.cache_folder(servers, self._workdir)
            with serving.serve(config.verifier, servers, wanted, log, cache, gpus) as endpoint:
                yield Lease(endpoint, storage, endpoint.ended, owned=True)
        finally:
            shutil.rmtree(storage, ignore_errors=True)

    def _close(self, lane: int) -> None:
        if (opened := self._open.pop(lane, None)) is not None:
            opened[0].close()

    def close(self) -> None:
        """Ends every server."""
        for lane in list(self._open):
            self._close(lane)


def check_storage(storage: Path) -> None:
    """Raises InputError unless the folder of the user's servers is there; removes what killed clients left in it."""
    if not storage.is_dir():
        raise InputError(f"servers.features_storage: {storage} is no folder here; the servers write into it")
    extraction.sweep(storage)


def storage_folder(workdir: Path, lane: int | str) -> Path:
    """Where a lane's server writes: on the pool's file system, so that a finished file moves in by a rename."""
    return workdir / "pool" / "features" / "incoming" / f"{extraction.process_name()}-{lane}"


def spec(config: RunConfig, storage: Path) -> serving.ServerSpec:
    """The extraction server of this configuration that writes into `storage`.

    Its context has one spare token: a trace as long as max_model_len is read back whole, and vLLM always generates one
    more.  Rows of `capture_while_generating` are a token shorter, and servers that also generate must end where a
    plain one does.
    """
    shape = verifier.load_shape(config.verifier)
    ids, fp8 = verifier.capture_ids(config.features.layer_ids, shape), config.features.store == "fp8"
    return serving.extraction_server(ids, storage, fp8, spare_tokens=1 - dropped_tokens(config))


def start_ahead(workdir: Path, config: RunConfig) -> None:
    """Begins to start the first lane's server, when the configuration allows it and servers are not named."""
    if not config.servers.features_endpoints:
        log, cache = workdir / "logs" / "extraction-ahead.log", serving.cache_folder(config.servers, workdir)
        serving.start_ahead(config.verifier, config.servers, spec(config, storage_folder(workdir, 0)), log, cache)


def sweep(workdir: Path) -> None:
    """Removes what the servers of this host's killed runs left behind."""
    for folder in (workdir / "pool" / "features" / "incoming").glob("*-*"):
        if extraction.process_is_gone(folder.name.rpartition("-")[0]):
            shutil.rmtree(folder, ignore_errors=True)


_shared: dict[str, Lanes] = {}


def _name(workdir: Path, config: RunConfig) -> str:
    captured = f"{config.features.layer_ids}:{config.features.store}:{dropped_tokens(config)}"
    return f"{workdir}:{config.verifier.model_dump_json()}:{config.servers.model_dump_json()}:{captured}"


@contextmanager
def shared(workdir: Path, config: RunConfig) -> Iterator[None]:
    """Inside the block, shards of this configuration in this process share its servers."""
    sweep(workdir)
    lanes = _shared[_name(workdir, config)] = Lanes(workdir, config)
    try:
        yield
    finally:
        del _shared[_name(workdir, config)]
        lanes.close()


@contextmanager
def lending(workdir: Path, config: RunConfig) -> Iterator[Lend]:
    """What one shard borrows from, as often as it needs: the shared lanes, else servers of its own for the block."""
    lanes = _shared.get(_name(workdir, config))
    if lanes is not None:
        yield lanes.borrow
        return
    own = Lanes(workdir, config, f"extraction-{extraction.process_name()}")  # other hosts write into the same folder
    try:
        yield own.borrow
    finally:
        own.close()


@contextmanager
def lend(workdir: Path, config: RunConfig) -> Iterator[Lease]:
    """A server for as long as the block lasts."""
    with lending(workdir, config) as borrow, borrow() as lease:
        yield lease
