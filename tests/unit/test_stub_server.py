"""The stand-ins for vLLM's server keep the promises that other tests and benchmarks rest on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from chaos_server import Chaos, ChaosServer
from stub_server import END, THINK_CLOSE, TOKENIZER, Capture, Reply, StubServer, ids_of
from tokenizers import Tokenizer

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    """A client that keeps its connections."""
    with httpx.Client(timeout=10) as client:
        yield client


def chat(http: httpx.Client, url: str, text: str = "hello", **fields: Any) -> httpx.Response:
    """Asks once."""
    body = {"model": "stub", "messages": [{"role": "user", "content": text}]} | fields
    return http.post(f"{url}/chat/completions", json=body)


def beside(url: str, path: str) -> str:
    """An address beside /v1."""
    return url.removesuffix("/v1") + path


def test_tool_calls_and_usage(stub: StubServer, http: httpx.Client) -> None:
    stub.on("hello", Reply(tool_calls=[CALL], finish_reason="tool_calls"), Reply(usage=(7, 9)), Reply(with_usage=False))
    prompt, output = ids_of("hello")
    first, second, third = (chat(http, stub.url).json() for _ in range(3))
    assert first["choices"][0]["message"]["tool_calls"] == [CALL]
    assert first["choices"][0]["finish_reason"] == "tool_calls"
    asked, made = len(prompt), len(output)
    assert first["usage"] == {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}
    assert second["usage"] == {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}
    assert "usage" not in third
    assert "tool_calls" not in third["choices"][0]["message"]


def test_only_an_error_says_when_to_come_back(stub: StubServer, http: httpx.Client) -> None:
    stub.on("hello", Reply(status=429, retry_after=1.5), Reply(retry_after=1.5))
    assert chat(http, stub.url).headers["Retry-After"] == "1.5"
    assert "Retry-After" not in chat(http, stub.url).headers


def test_a_function_decides_by_messages_and_number(stub: StubServer, http: httpx.Client) -> None:
    stub.on("a", Reply(status=400))
    stub.on_chat(lambda body, number: Reply(answer=f"{body['seed']} {number}"))
    system = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    answers = [
        chat(http, stub.url, "a", seed=1),
        chat(http, stub.url, "a", seed=2),
        chat(http, stub.url, seed=3, messages=system),
    ]
    choices = [answer.json()["choices"][0] for answer in answers]
    assert [choice["message"]["content"] for choice in choices] == ["1 0", "2 1", "3 0"]
    assert choices[0]["token_ids"] == ids_of("a")[1]


def test_the_context_has_an_end(http: httpx.Client) -> None:
    prompt, output = ids_of("hello")
    with StubServer(max_model_len=len(prompt) + 3) as stub:
        assert http.get(f"{stub.url}/models").json()["data"][0]["max_model_len"] == len(prompt) + 3
        assert chat(http, stub.url, max_tokens=4).json()["choices"][0]["token_ids"] == output
        stub.strict_context = True
        refused = chat(http, stub.url, max_tokens=4)
        assert refused.status_code == 400
        assert f"maximum context length is {len(prompt) + 3} tokens" in refused.json()["error"]["message"]
        cut = chat(http, stub.url, max_tokens=3).json()
        assert (cut["choices"][0]["token_ids"], cut["choices"][0]["finish_reason"]) == (output[:3], "length")
        assert cut["usage"]["completion_tokens"] == 3
        stub.on("hello", Reply(status=503))
        assert chat(http, stub.url, max_tokens=4).status_code == 503


def test_tokenize(stub: StubServer, http: httpx.Client) -> None:
    def ask(**body: Any) -> httpx.Response:
        return http.post(beside(stub.url, "/tokenize"), json={"model": "stub"} | body)

    prompt = ids_of("hello")[0]
    messages = [{"role": "user", "content": "hello"}]
    assert ask(messages=messages).json() == {"count": len(prompt), "max_model_len": 4096, "tokens": prompt}
    ids = Tokenizer.from_file(str(TOKENIZER)).encode("1 + 2", add_special_tokens=False).ids
    assert ask(prompt="1 + 2").json()["tokens"] == ids
    stub.on_tokenize(lambda body: 404 if "prompt" in body else [1, 2])
    assert ask(prompt="1 + 2").status_code == 404
    assert ask(messages=messages).json()["tokens"] == [1, 2]
    assert len(stub.asked("/tokenize")) == 4


def test_away_resets_and_refuses_and_back_is_the_same_port(stub: StubServer, http: httpx.Client) -> None:
    stub.on("slow", Reply(delay_s=30))
    chat(http, stub.url)
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(chat, http, stub.url, "slow")
        while not stub.hits("slow"):
            time.sleep(0.01)
        stub.away()
        assert isinstance(slow.exception(timeout=5), httpx.ReadError)
    with pytest.raises(httpx.ConnectError):
        chat(http, stub.url, "while away")
    stub.back()
    assert chat(http, stub.url, "again").status_code == 200
    assert stub.hits("while away") == 0


def test_away_from_a_function_of_the_server(stub: StubServer, http: httpx.Client) -> None:
    def decide(body: dict[str, Any], number: int) -> Reply:
        if number == 0:
            stub.away()
        return Reply()

    stub.on_chat(decide)
    with pytest.raises(httpx.ReadError):
        chat(http, stub.url)
    stub.back()
    assert chat(http, stub.url).status_code == 200


def test_requests_beyond_the_limit_are_refused_at_once(stub: StubServer, http: httpx.Client) -> None:
    stub.default, stub.max_concurrent = Reply(delay_s=0.5), 3
    gate = threading.Barrier(8)

    def one(_: int) -> int:
        gate.wait()
        return chat(http, stub.url).status_code

    with ThreadPoolExecutor(8) as threads:
        assert Counter(threads.map(one, range(8))) == {200: 3, 503: 5}
    assert stub.peak == 3
    assert chat(http, stub.url).status_code == 200


def test_a_client_that_hangs_up_frees_its_place(stub: StubServer) -> None:
    stub.on("slow", Reply(delay_s=30))
    stub.max_concurrent = 1
    with httpx.Client(timeout=0.2) as http, pytest.raises(httpx.ReadTimeout):
        chat(http, stub.url, "slow")
    with httpx.Client() as http:
        while chat(http, stub.url).status_code == 503:
            time.sleep(0.01)


def test_requests_know_their_time(stub: StubServer, http: httpx.Client) -> None:
    before = time.time()
    chat(http, stub.url)
    assert before <= stub.requests[0].at <= time.time()


TEXTS = [f"prompt {i}" for i in range(300)]


def fates(chaos: Chaos, number: int = 0) -> list[str]:
    """The outcomes of one request for every text."""
    return [chaos.outcome(text, number) for text in TEXTS]


def test_chaos_is_the_same_every_time_and_faults_pass() -> None:
    chaos = Chaos(errors=0.1, drops=0.1, cut=0.1, seed=1)
    assert fates(chaos) == fates(Chaos(errors=0.1, drops=0.1, cut=0.1, seed=1))
    assert fates(chaos) != fates(Chaos(errors=0.1, drops=0.1, cut=0.1, seed=2))
    counts = Counter(fates(chaos))
    assert all(10 < counts[outcome] < 60 for outcome in ("error", "drop", "cut"))
    for text in TEXTS:
        later = {chaos.outcome(text, number) for number in range(20)} - {"error", "drop"}
        assert len(later) == 1


def test_chaos_answers_have_their_length() -> None:
    for tokens in (4, 5, 100):
        whole, cut = (list(Chaos(tokens=tokens).reply("t", cut).output_ids or ()) for cut in (False, True))
        assert len(whole) == len(cut) == tokens
        assert (whole.count(THINK_CLOSE), whole.count(END), whole[-1]) == (1, 1, END)
        assert 0 < whole.index(THINK_CLOSE) < tokens - 2
        assert not {THINK_CLOSE, END} & set(cut)


def test_chaos_over_http_is_what_it_decided(http: httpx.Client) -> None:
    chaos = Chaos(tokens=20, errors=0.2, drops=0.2, cut=0.2)
    seen: list[str] = []
    with ChaosServer(chaos) as server:
        for text in TEXTS[:40]:
            try:
                answer = chat(http, server.url, text)
            except httpx.RemoteProtocolError:
                seen.append("drop")
                continue
            if answer.status_code == 503:
                seen.append("error")
                continue
            choice = answer.json()["choices"][0]
            assert len(choice["token_ids"]) == answer.json()["usage"]["completion_tokens"] == 20
            assert (choice["message"]["content"] is None) == (choice["finish_reason"] == "length")
            seen.append("cut" if choice["finish_reason"] == "length" else "ok")
    assert seen == fates(chaos)[:40]
    assert len(set(seen)) == 4


def eventually(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """The first answer of a server that is coming back."""
    while True:
        with suppress(httpx.TransportError):
            return ask()
        time.sleep(0.05)


def test_the_chaos_process(root: Path, tmp_path: Path, http: httpx.Client) -> None:
    log = tmp_path / "requests.jsonl"
    command = [sys.executable, root / "tests/chaos_server.py", "--tokens", "10", "--errors", "0.5", "--log", log]
    with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("listening ").strip()
            statuses = [chat(http, url, text).status_code for text in TEXTS[:20]]
            while len(log.read_text().splitlines()) < 20:
                time.sleep(0.01)
            assert http.post(beside(url, "/control/away"), json={"seconds": 1}).status_code == 200
            time.sleep(0.3)
            with pytest.raises(httpx.TransportError):
                chat(http, url, "while away")
            counts = eventually(lambda: http.get(beside(url, "/control/counts"))).json()
            chat(http, url, TEXTS[20])
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["text"] for line in lines] == TEXTS[:21]
    assert ["ok" if status == 200 else "error" for status in statuses] == [line["outcome"] for line in lines[:20]]
    assert counts == {"requests": 20, "drop": 0, "cut": 0} | Counter(line["outcome"] for line in lines[:20])
    assert sorted(lines, key=lambda line: line["t"]) == lines


def test_log_probabilities_are_given_to_who_asks(stub: StubServer, http: httpx.Client) -> None:
    stub.on_capture(lambda tokens, number: Capture(prompt_logprobs=[None, {7: -2.5, 9: -0.1}]))
    body = {"model": "stub", "prompt": [3, 7], "max_tokens": 1}
    asked = http.post(f"{stub.url}/completions", json=body | {"prompt_logprobs": 2}).json()["choices"][0]
    assert asked["prompt_logprobs"][0] is None
    assert list(asked["prompt_logprobs"][1]) == ["9", "7"]
    assert asked["prompt_logprobs"][1]["7"] == {"logprob": -2.5, "rank": 2, "decoded_token": "x"}
    assert "prompt_logprobs" not in http.post(f"{stub.url}/completions", json=body).json()["choices"][0]
    stub.on_capture(lambda tokens, number: Capture(refuses_logprobs=True))
    assert http.post(f"{stub.url}/completions", json=body | {"prompt_logprobs": 2}).status_code == 400
    assert http.post(f"{stub.url}/completions", json=body).status_code == 200
