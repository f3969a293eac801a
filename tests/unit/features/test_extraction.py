"""One extraction server: when a file is complete, when it will not come, what is swept, what waiting costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from stub_server import Capture, StubServer, states_of

from slipstream import chat
from slipstream.chat import Unreachable
from slipstream.concurrent import run_async
from slipstream.errors import ServerError
from slipstream.features import extraction
from slipstream.features.extraction import ExtractionServer, NoFile
from slipstream.serving import Endpoint


def asking(stub: StubServer, work: Callable[[ExtractionServer], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with chat.session(20) as session:
            server = ExtractionServer(Endpoint(stub.url, "stub"), session, stub.storage)
            try:
                return await work(server)
            finally:
                server.close()

    return run_async(main())


async def sample(server: ExtractionServer, tokens: list[int], **fields: object) -> tuple[bytes, dict[str, Any]]:
    async with server.sample(tokens, 10, **fields) as written:
        return written.path.read_bytes(), written.answer


def test_the_file_and_the_answer_of_one_request(stub: StubServer) -> None:
    data, answer = asking(stub, lambda server: sample(server, [5, 6, 7], prompt_logprobs=5))
    assert states_of([5, 6, 7], 4, 8).tobytes() in data
    assert answer["object"] == "text_completion"
    assert stub.asked("/v1/completions")[0]["prompt_logprobs"] == 5
    assert list(stub.storage.iterdir()) == []


def test_a_writer_that_failed_is_noticed_at_once(stub: StubServer) -> None:
    stub.on_capture(lambda tokens, number: Capture(failed=tokens != [1]))
    began = time.monotonic()
    with pytest.raises(NoFile, match="its writer ended without the file"):
        asking(stub, lambda server: sample(server, [5, 6, 7]))
    assert time.monotonic() - began < 5
    assert [body["prompt"] for body in stub.asked("/v1/completions")] == [[5, 6, 7], [1]]
    assert list(stub.storage.iterdir()) == []


def test_a_held_lock_is_waited_for(stub: StubServer) -> None:
    stub.on_capture(lambda tokens, number: Capture(write_delay_s=0.6))
    assert len(asking(stub, lambda server: sample(server, [5, 6, 7]))[0]) > 100


def test_waiting_for_many_files_is_not_busy(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    of = extraction._Lock.of.__func__
    monkeypatch.setattr(extraction._Lock, "of", classmethod(lambda cls, path: looks.append(path) or of(cls, path)))
    stub.on_capture(lambda tokens, number: Capture(write_delay_s=1.5))

    async def many(server: ExtractionServer) -> None:
        await asyncio.gather(*(sample(server, [5, i]) for i in range(64)))

    asking(stub, many)
    assert len(set(looks)) >= 64
    assert len(looks) < 64 * 60  # every 50 ms at most, after a few quick looks
    assert len(stub.asked("/v1/completions")) <= 64 + 4  # they share the flush


def test_an_engine_that_works_is_not_flushed(stub: StubServer) -> None:
    """As long as another request is in flight the engine steps by itself."""

    def decide(tokens: list[int], number: int) -> Capture:
        return Capture(write_delay_s=0.8) if tokens[0] == 5 else Capture(delay_s=1.2)

    stub.on_capture(decide)

    async def two(server: ExtractionServer) -> None:
        await asyncio.gather(sample(server, [5, 6]), sample(server, [7, 8]))

    asking(stub, two)
    assert [1] not in [body["prompt"] for body in stub.asked("/v1/completions")]


def test_an_engine_that_died_behind_its_server_is_not_alive(stub: StubServer) -> None:
    async def alive(server: ExtractionServer) -> bool | None:
        return await server.alive()

    assert asking(stub, alive) is True  # no /health there
    stub.health = 200
    assert asking(stub, alive) is True
    stub.health = 503
    assert asking(stub, alive) is False
    stub.away()
    assert asking(stub, alive) is False


@pytest.mark.parametrize("named", ["", "/etc/passwd"])
def test_a_path_that_is_none_of_ours_is_refused(stub: StubServer, named: str) -> None:
    stub.on_capture(lambda tokens, number: Capture(named=named, write=False))
    with pytest.raises(ServerError, match=r"storage folder|not an extraction server"):
        asking(stub, lambda server: sample(server, [5, 6]))


def test_what_dead_clients_of_this_host_never_fetched_is_swept(tmp_path: Path) -> None:
    mine = extraction.process_name()
    host = mine.rpartition("-")[0]
    dead = f"cmpl-slipstream-{host}-99999999-3-0-ab12.safetensors"
    others = [
        f"cmpl-slipstream-{mine}-3-0-ab12.safetensors",  # a living client
        "cmpl-slipstream-another-host-99999999-3-0-ab12.safetensors",
        "cmpl-5f3e-0-ab12.safetensors",
        "notes.txt",
    ]
    for name in [dead, dead + ".lock", *others]:
        (tmp_path / name).touch()
    assert extraction.sweep(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
    assert extraction.sweep(tmp_path / "none") == 0


def test_a_file_whose_answer_was_lost_on_the_way_is_removed_in_the_end(stub: StubServer) -> None:
    def decide(tokens: list[int], number: int) -> Capture:
        if number == 0:
            stub.write(Capture(), tokens, stub.paths[0])
            return Capture(status=500)
        return Capture()

    stub.on_capture(decide)

    async def twice(server: ExtractionServer) -> None:
        with pytest.raises(Unreachable):
            await sample(server, [5, 6])
        await sample(server, [5, 6])
        assert stub.paths[0].exists()

    asking(stub, twice)
    assert list(stub.storage.iterdir()) == []


def test_requests_of_a_process_have_names_of_their_own(stub: StubServer) -> None:
    async def two(server: ExtractionServer) -> None:
        await asyncio.gather(sample(server, [5, 6]), sample(server, [5, 6]))

    asking(stub, two)
    names = [body["request_id"] for body in stub.asked("/v1/completions")]
    assert len(set(names)) == 2
    for name in names:
        found = extraction.OURS.match(f"cmpl-{name}-0-1a2b.safetensors")
        assert found is not None
        assert found["process"] == extraction.process_name()
