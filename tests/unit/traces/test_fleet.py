"""Several servers as one: who repeats what how often, and what happens when a server goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from stub_server import Reply, StubServer

from slipstream import chat
from slipstream.chat import Answer
from slipstream.errors import InputError, ServerError, TransientError
from slipstream.serving import Endpoint
from slipstream.traces import fleet as fleets
from slipstream.traces.fleet import Fleet, sailing


@pytest.fixture
def two() -> Iterator[list[StubServer]]:
    """Two servers."""
    with StubServer() as one, StubServer() as other:
        yield [one, other]


async def admit(server: chat.Server) -> None:
    """Lets anybody in."""


def sail(
    stubs: list[StubServer],
    use: Callable[[Fleet], Coroutine[Any, Any, Any]],
    maximum: int = 8,
    patience_s: float = 20,
    timeout_s: float = 20,
    admit: fleets.Admit = admit,
) -> Any:
    """What `use` gives with a fleet of these servers."""

    async def one() -> Any:
        endpoints = [Endpoint(stub.url, "stub") for stub in stubs]
        async with (
            chat.connect(endpoints, timeout_s) as servers,
            sailing(servers, maximum, patience_s, admit) as fleet,
        ):
            return await use(fleet)

    return asyncio.run(one())


async def ask(fleet: Fleet, text: str, attempts: int = 3) -> Answer:
    """One request."""
    messages = [{"role": "user", "content": text}]
    return await fleet.send(
        lambda server: server.chat(messages, [], {}), attempts, lambda answer: len(answer.output_ids or ())
    )


@pytest.mark.usefixtures("no_backoff")
@pytest.mark.parametrize("bad", [Reply(status=408), Reply(status=429), Reply(status=503), Reply(drop=True)])
def test_what_is_transient_is_asked_again(stub: StubServer, bad: Reply) -> None:
    stub.on("B", bad, bad, Reply(answer="b"))
    assert sail([stub], lambda fleet: ask(fleet, "B")).answer == "b"
    assert stub.hits("B") == 3


def test_a_permanent_refusal_is_asked_once(stub: StubServer) -> None:
    stub.on("A", Reply(status=400))
    with pytest.raises(chat.Refused):
        sail([stub], lambda fleet: ask(fleet, "A", attempts=5))
    assert stub.hits("A") == 1


@pytest.mark.usefixtures("no_backoff")
@pytest.mark.parametrize("attempts", [1, 3])
def test_attempts_are_a_bound(stub: StubServer, attempts: int) -> None:
    stub.on("E", Reply(status=500))
    with pytest.raises(TransientError, match="HTTP 500"):
        sail([stub], lambda fleet: ask(fleet, "E", attempts))
    assert stub.hits("E") == attempts


def test_the_servers_wish_is_waited_for(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets.random, "uniform", lambda low, high: 0.0)
    stub.on("W", Reply(status=429, retry_after=0.4), Reply())
    started = time.monotonic()
    sail([stub], lambda fleet: ask(fleet, "W"))
    assert time.monotonic() - started > 0.4


def test_a_refusal_makes_the_window_smaller(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets.random, "uniform", lambda low, high: 0.0)
    stub.max_concurrent, stub.default = 4, Reply(delay_s=0.05)

    async def use(fleet: Fleet) -> tuple[int, int]:
        await asyncio.gather(*(ask(fleet, f"p{i}") for i in range(12)))
        return fleet.lanes[0].window.backoffs, fleet.lanes[0].window.limit

    backoffs, limit = sail([stub], use, maximum=8)
    assert backoffs == 1
    assert limit < 8


def test_a_server_that_only_refuses_costs_no_prompt_while_another_answers(two: list[StubServer]) -> None:
    """A gateway without its engine: it answers fastest, and would draw all work to itself."""
    two[0].default = Reply(status=503)
    two[1].default = Reply(delay_s=0.02)

    async def use(fleet: Fleet) -> list[Answer]:
        return await asyncio.gather(*(ask(fleet, f"p{i}", attempts=2) for i in range(60)))

    assert len(sail(two, use, maximum=8)) == 60
    assert len(two[0].asked()) < 60


def test_a_page_of_the_proxy_where_the_server_was(two: list[StubServer], monkeypatch: pytest.MonkeyPatch) -> None:
    two[0].default = Reply(status=502)

    async def use(fleet: Fleet) -> Answer:
        async def gone() -> bool:
            return False

        fleet.lanes[0].server.alive = gone  # type: ignore[method-assign]
        answers = await asyncio.gather(*(ask(fleet, f"p{i}", attempts=1) for i in range(8)))
        assert fleet.lanes[0].away
        return answers[0]

    assert sail(two, use).finish_reason == "stop"


def test_who_waits_longest_is_next(stub: StubServer) -> None:
    stub.default = Reply(delay_s=0.02)
    texts = iter([f"p{i:02}" for i in range(40)])
    order: list[str] = []

    async def use(fleet: Fleet) -> None:
        async def work() -> None:
            for text in texts:
                await ask(fleet, text)
                order.append(text)

        await asyncio.gather(*(work() for _ in range(4)))

    sail([stub], use, maximum=2)
    late = max(abs(i - order.index(f"p{i:02}")) for i in range(40))
    assert late <= 4


def test_trouble_while_coming_back_is_no_trouble_for_the_others(
    two: list[StubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "LOOK_AGAIN_S", 0.02)
    looked = 0

    async def admit(server: chat.Server) -> None:
        nonlocal looked
        looked += 1
        if server.endpoint.url == two[1].url and looked > 2:
            raise AttributeError("what it sent was no list of models")

    async def use(fleet: Fleet) -> Answer:
        fleet.lanes[1].leave()
        await asyncio.sleep(0.2)
        assert fleet.lanes[1].away
        assert fleet.lost is None
        return await ask(fleet, "p")

    assert sail(two, use, admit=admit).finish_reason == "stop"
    assert looked > 4


def test_never_more_in_flight_than_the_window(stub: StubServer) -> None:
    stub.default = Reply(delay_s=0.02)

    async def use(fleet: Fleet) -> None:
        await asyncio.gather(*(ask(fleet, f"p{i}") for i in range(40)))

    sail([stub], use, maximum=5)
    assert stub.peak == 5


def test_a_window_that_grew_is_filled(stub: StubServer) -> None:
    """Those who wait are woken when it grows, not only one for each that ends."""
    stub.default = Reply(delay_s=0.05)

    async def use(fleet: Fleet) -> None:
        await asyncio.gather(*(ask(fleet, f"p{i}") for i in range(150)))

    sail([stub], use, maximum=60)
    assert stub.peak > 40


def test_the_least_loaded_takes_the_next(two: list[StubServer]) -> None:
    two[0].default = Reply(delay_s=0.2)
    two[1].default = Reply(delay_s=0.01)
    texts = iter([f"p{i}" for i in range(60)])

    async def use(fleet: Fleet) -> None:
        async def work() -> None:
            for text in texts:
                await ask(fleet, text)

        await asyncio.gather(*(work() for _ in range(8)))

    sail(two, use, maximum=8)
    slow, fast = (len(server.asked()) for server in two)
    assert slow + fast == 60
    assert fast > 2 * slow


def test_a_server_that_goes_away_costs_no_attempt_and_comes_back(
    two: list[StubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "LOOK_AGAIN_S", 0.05)
    two[0].default = Reply(delay_s=5)

    async def use(fleet: Fleet) -> list[Answer]:
        first = [asyncio.ensure_future(ask(fleet, f"p{i}", attempts=1)) for i in range(8)]
        while len(two[0].asked()) < 4:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(two[0].away)
        answers = await asyncio.gather(*first)
        assert fleet.lanes[0].away
        two[0].default = Reply()
        await asyncio.to_thread(two[0].back)
        while fleet.lanes[0].away:
            await asyncio.sleep(0.01)
        asked = len(two[0].asked())
        await asyncio.gather(*(ask(fleet, f"q{i}", attempts=1) for i in range(8)))
        assert len(two[0].asked()) - asked == 4
        return answers

    answers = sail(two, use)
    assert len(answers) == 8
    assert len(two[1].asked()) == 8 + 4


def test_work_on_a_server_that_hangs_moves_on(two: list[StubServer], monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that vanished without closing its connections answers no probe either."""
    monkeypatch.setattr(fleets, "WATCH_S", 0.05)
    two[0].default = Reply(delay_s=60)

    async def use(fleet: Fleet) -> Answer:
        waiting = asyncio.ensure_future(ask(fleet, "p", attempts=1))
        await asyncio.sleep(0.05)

        async def dead() -> bool:
            return False

        fleet.lanes[0].server.alive = dead  # type: ignore[method-assign]
        return await waiting

    assert sail(two, use).finish_reason == "stop"
    assert [server.hits("p") for server in two] == [1, 1]


def test_all_away_for_too_long_ends_it(two: list[StubServer]) -> None:
    for server in two:
        server.away()
    with pytest.raises(TransientError, match="does not answer: for 1 s; what was answered is kept"):
        sail(two, lambda fleet: ask(fleet, "p"), patience_s=1)


def test_a_server_may_come_later(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "LOOK_AGAIN_S", 0.05)
    stub.away()

    async def use(fleet: Fleet) -> Answer:
        waiting = asyncio.ensure_future(ask(fleet, "p"))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(stub.back)
        return await waiting

    assert sail([stub], use).answer == "yes"


def test_a_server_that_refuses_everything_ends_it(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "BACK_OFF_S", 0.05)
    stub.default = Reply(status=429)

    async def use(fleet: Fleet) -> None:
        await asyncio.gather(*(ask(fleet, f"p{i}", attempts=100) for i in range(4)))

    with pytest.raises(TransientError, match=r"HTTP 429.*: for 1 s; what was answered is kept"):
        sail([stub], use, patience_s=1)


def test_a_thousand_refusals_are_a_pause_like_any_other() -> None:
    assert 0 <= fleets._jitter(5000) <= fleets.BACK_OFF_S


def test_a_gateway_at_its_limit_is_not_taken_for_dead(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses the probe as well; what it is working on must not be taken back."""
    monkeypatch.setattr(fleets, "BACK_OFF_S", 0.05)
    stub.max_concurrent, stub.default = 2, Reply(delay_s=0.1)

    async def use(fleet: Fleet) -> int:
        async def refusing() -> None:
            return None

        fleet.lanes[0].server.alive = refusing  # type: ignore[method-assign]
        await asyncio.gather(*(ask(fleet, f"p{i}") for i in range(12)))
        return fleet.lanes[0].absences

    assert sail([stub], use) == 0


def test_leaving_in_the_last_moment_does_not_hang(stub: StubServer) -> None:
    async def use(fleet: Fleet) -> None:
        await asyncio.sleep(0.01)
        fleet.lanes[0].leave()

    sail([stub], use)


def test_only_wrong_servers_end_it_at_once(two: list[StubServer]) -> None:
    async def refuse(server: chat.Server) -> None:
        raise chat.Refused("serves other, not stub")

    started = time.monotonic()
    with pytest.raises(ServerError, match=r"no server can be used: .*serves other, not stub"):
        sail(two, lambda fleet: ask(fleet, "p"), admit=refuse)
    assert time.monotonic() - started < 5


def test_one_that_comes_back_with_another_tokenizer_stays_out(
    two: list[StubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "LOOK_AGAIN_S", 0.02)
    started = False

    async def admit(server: chat.Server) -> None:
        if started:
            raise InputError("special tokens differ")

    async def use(fleet: Fleet) -> Answer:
        nonlocal started
        started = True
        fleet.lanes[1].leave()
        await asyncio.sleep(0.1)
        assert "special tokens differ" in fleet.complaints()
        return await ask(fleet, "p")

    assert sail(two, use, admit=admit).finish_reason == "stop"
    assert not two[1].asked()


def test_nobody_is_asked_before_it_is_admitted(two: list[StubServer]) -> None:
    async def refuse_one(server: chat.Server) -> None:
        if server.endpoint.url == two[1].url:
            raise InputError("another tokenizer")

    with pytest.raises(InputError, match="another tokenizer"):
        sail(two, lambda fleet: ask(fleet, "p"), admit=refuse_one)
    assert not two[0].asked() + two[1].asked()


def test_a_cancelled_caller_is_not_taken_for_a_dead_server(stub: StubServer) -> None:
    stub.default = Reply(delay_s=5)

    async def use(fleet: Fleet) -> None:
        waiting = asyncio.ensure_future(ask(fleet, "p"))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert fleet.lanes[0].in_flight == 0

    sail([stub], use)
    assert stub.hits("p") == 1
