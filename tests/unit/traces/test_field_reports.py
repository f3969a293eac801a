"""Faults that people in this field meet (stages S1 to S3), each with the outcome it asks for.

The numbers are those of the field reports that the project started from.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stub_server import CUT, END, THINK_CLOSE, Reply, ids_of
from tokenizers import AddedToken, Tokenizer, models

from slipstream.errors import InputError, StageFailed
from slipstream.special_tokens import check_loaded
from slipstream.traces import prompt_set, stage
from slipstream.traces.prompts import parse
from tests.unit.traces.conftest import Runner, rejects_of, rows_of, summary_of

TEXTS = [f"prompt {i}" for i in range(30)]
THREE = ["one", "two", "three"]
# every prompt is traced but for what the splits need: these tests count requests
pytestmark = pytest.mark.usefixtures("no_backoff")


@pytest.fixture
def run(run: Runner, write_prompts: Callable[..., str]) -> Runner:
    """Held-out prompts apart, so that all rows are traced."""
    config = run.config

    def apart(rows: list[Any], verifier: dict[str, Any] | None = None, **traces: Any) -> Any:
        made = config(rows, verifier, **traces)
        held_out = [{"path": write_prompts(["held out"], "held-out.jsonl")}]
        prompts = made.prompts.model_dump() | {"held_out_sources": held_out, "held_out_ratio": 0, "val_ratio": 0.4}
        return made.model_copy(update={"prompts": type(made.prompts).model_validate(prompts)})

    run.config = apart  # type: ignore[method-assign]
    return run


def raw(run: Runner, path: Path, lines: list[bytes], **prompts: Any) -> Any:
    """Runs on a file of raw lines."""
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    config = run.config(["x"])
    changed = config.prompts.model_dump() | {"sources": [{"path": str(path)}]} | prompts
    config = config.model_copy(update={"prompts": type(config.prompts).model_validate(changed)})
    made = prompt_set.run(run.root, config.prompts)
    traces = stage.run(run.root, config, made, run.servers, lambda progress: None)
    return made, traces


@pytest.mark.parametrize(
    "bad",
    [
        rb'{"id":"s2","messages":[{"role":"user","content":"ok \ud800 end"}]}',
        b'{"id":"s2","messages":[{"role":"user","content":"ok \xff\xfe end"}]}',
    ],
    ids=["half a surrogate pair", "bytes FF FE"],
)
def test_1_text_that_cannot_be_encoded(run: Runner, tmp_path: Path, bad: bytes) -> None:
    good = [json.dumps({"id": f"s{i}", "prompt": f"p {i}"}).encode() for i in (1, 3)]
    prompts, traces = raw(run, tmp_path / "p.jsonl", [good[0], bad, good[1]], max_rejected_share=0.5)
    assert len(rows_of(traces)) == 2
    assert [reject["row"] for reject in rejects_of(prompts.folder)] == [2]
    assert len(run.stub.asked()) == 2


def test_2_prompts_at_the_context_limit(run: Runner) -> None:
    """Limit 32: 31 tokens leave room for one, 32 and 33 for none."""
    run.stub.max_model_len, run.stub.strict_context = 32, True
    lengths = {"a" * 31: 31, "b" * 32: 32, "c" * 33: 33}

    def tokens(body: dict[str, Any]) -> list[int] | int:
        if "prompt" in body:
            return 404
        return [5] * lengths.get(body["messages"][-1]["content"], 3)

    run.stub.on_tokenize(tokens)
    run.stub.on_chat(
        lambda body, number: Reply(prompt_ids=[5] * lengths[body["messages"][-1]["content"]], output_ids=[30] * 16)
    )
    rows = [{"id": text[0], "prompt": text} for text in lengths]
    made = run(rows, max_rejected_share=0.9, max_truncated_share=1.0)
    kept = rows_of(made)
    assert [(row["prompt_tokens"], len(row["input_ids"]), row["finish_reason"]) for row in kept] == [(31, 32, "length")]
    listed = {reject["id"]: reject["reason"] for reject in rejects_of(made.folder)}
    assert listed == {
        name: f"prompt_too_long: {count} tokens, the server takes 32" for name, count in (("b", 32), ("c", 33))
    }
    assert [body["max_tokens"] for body in run.stub.asked()] == [1]


def test_2_everything_dropped_is_a_failure(run: Runner) -> None:
    run.stub.max_model_len = 8
    run.stub.on_tokenize(lambda body: 404 if "prompt" in body else [5] * 9)
    with pytest.raises(StageFailed, match=r"3 of 3 .*prompt_too_long: 9 tokens"):
        run(THREE, max_rejected_share=0.99)
    assert not run.stub.asked()


def test_4_both_spellings_of_the_thinking(run: Runner) -> None:
    spelling = {text: ("reasoning", "reasoning_content")[i % 2] for i, text in enumerate(TEXTS)}
    same = {"prompt_ids": [491, 7, 504], "output_ids": [8, THINK_CLOSE, 9, END], "thinking": "2+2", "answer": "4"}
    run.stub.on_chat(lambda body, number: Reply(spelling=spelling[body["messages"][-1]["content"]], **same))
    rows = rows_of(run(TEXTS))
    assert len(rows) == 30
    assert {(row["thinking"], row["answer"], tuple(row["input_ids"])) for row in rows} == {
        ("2+2", "4", (491, 7, 504, 8, THINK_CLOSE, 9, END))
    }


def test_4_neither_spelling_anywhere_is_a_failure(run: Runner) -> None:
    run.stub.default = Reply(spelling=None)
    with pytest.raises(StageFailed, match=r"20 of 20 .*no_reasoning.*--reasoning-parser"):
        run(TEXTS[:20], max_rejected_share=0.99)


@pytest.mark.parametrize("keep", [True, False])
def test_5_thinking_that_was_cut(run: Runner, keep: bool) -> None:
    for text in TEXTS[:3]:
        run.stub.on(text, CUT)
    made = run(TEXTS[:10], keep_truncated=keep, max_rejected_share=0.5)
    assert summary_of(made)["truncated_answers"] == 3
    rows = rows_of(made)
    assert all(row["answer"] or row["finish_reason"] == "length" for row in rows)
    cut = [row for row in rows if row["finish_reason"] == "length"]
    assert len(cut) == (3 if keep else 0)
    for row in cut:
        assert row["input_ids"][row["prompt_tokens"] :] == [30, 31, 32]  # open: neither </think> nor an end token
        assert (row["think_end"], row["answer"]) == (-1, None)


def conversation(*turns: tuple[str, str]) -> dict[str, Any]:
    """A prompt row of these (role, content) turns."""
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def numbered(run: Runner, thinking: str = "R{}") -> None:
    """The n-th answer in a conversation is G<n>."""

    def decide(body: dict[str, Any], number: int) -> Reply:
        n = 1 + sum(turn["role"] == "assistant" for turn in body["messages"])
        return Reply(
            answer=f"G{n}", thinking=thinking.format(n), prompt_ids=[n] * 5, output_ids=[n, THINK_CLOSE, n, END]
        )

    run.stub.on_chat(decide)


def test_7_later_turns_stand_on_the_fresh_answers(run: Runner) -> None:
    numbered(run)
    row = conversation(("system", "Be brief."), ("user", "u1"), ("assistant", "OLD"), ("user", "u2"))
    made = run([row, "other 1", "other 2"])
    bodies = [body["messages"] for body in run.stub.asked() if body["messages"][0]["role"] == "system"]
    assert [[turn["role"] for turn in messages] for messages in bodies] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
    ]
    assert bodies[1][2]["content"] == "G1"
    everything = json.dumps(run.stub.asked()) + "".join(map(str, rows_of(made)))
    assert "OLD" not in everything
    key = parse(row).key
    assert [(r["turn"], r["answer"]) for r in rows_of(made) if r["key"] == key] == [(0, "G1"), (1, "G2")]


def test_7_a_conversation_that_broke_off_is_continued_not_repeated(run: Runner) -> None:
    """Partial conversations are never taken for complete."""
    row = conversation(("user", "u1"), ("assistant", "x"), ("user", "u2"), ("assistant", "x"), ("user", "u3"))
    broken = True

    def decide(body: dict[str, Any], number: int) -> Reply:
        users = sum(turn["role"] == "user" for turn in body["messages"])
        return Reply(status=500) if broken and users == 3 else Reply(answer=f"G{users}")

    run.stub.on_chat(decide)
    first = run([row, *TEXTS[:29]])
    key = parse(row).key
    assert key not in {r["key"] for r in rows_of(first)}
    assert [(r["key"], r["reason"]) for r in rejects_of(first.folder)] == [(key, "HTTP 500: stub says 500")]
    broken = False
    asked = len(run.stub.asked())
    again = run([row, *TEXTS[:29]], keep_truncated=False)
    assert [len(body["messages"]) for body in run.stub.asked()[asked:]] == [5]
    assert [r["answer"] for r in rows_of(again) if r["key"] == key] == ["G1", "G2", "G3"]


def test_10_one_owner_of_retries(run: Runner) -> None:
    """Timeout 0.2 s against an answer after 2 s: exactly max_attempts requests, one record."""
    slow = run.traced(TEXTS)[0]
    run.stub.on(slow, Reply(delay_s=2))
    made = run(TEXTS, request_timeout_s=0.2, max_attempts=3)
    assert run.stub.hits(slow) == 3
    assert [reject["reason"] for reject in rejects_of(made.folder)] == ["timeout: no answer within request_timeout_s"]
    assert len(rows_of(made)) == 29


def test_11_the_servers_ids_are_kept(run: Runner) -> None:
    """`he` + `llo` was sampled; encoding the text again would give `hello`, id 7."""
    run.stub.default = Reply(thinking="hello", answer="hello", prompt_ids=(1, 2), output_ids=(4, 6, THINK_CLOSE, 4, 6))
    assert {tuple(row["input_ids"]) for row in rows_of(run(THREE))} == {(1, 2, 4, 6, THINK_CLOSE, 4, 6)}


def test_11_without_ids_the_mismatch_is_measured_and_bounded(run: Runner) -> None:
    """Text alone: one row in ten comes out a token shorter than what the server counted."""
    whole = {text: ids_of(text) for text in TEXTS}

    def render(body: dict[str, Any]) -> list[int] | int:
        if "prompt" in body:
            return 404
        users = [turn["content"] for turn in body["messages"] if turn["role"] == "user"]
        if users[-1] not in whole:
            return [491, 5, 504]
        prompt, output = whole[users[-1]]
        return prompt + (output if body["messages"][-1]["role"] == "assistant" else [])

    def decide(body: dict[str, Any], number: int) -> Reply:
        text = body["messages"][-1]["content"]
        prompt, output = whole[text]
        return Reply(with_ids=False, usage=(len(prompt), len(output) + (text in TEXTS[:3])))

    run.stub.on_tokenize(render)
    run.stub.on_chat(decide)
    made = run(TEXTS, max_mismatch_share=0.2, max_rejected_share=0.2)
    assert summary_of(made)["mismatch_share"] == 0.1
    rows = rows_of(made)
    assert {row["ids"] for row in rows} == {"rebuilt"}
    assert {row["key"]: row["input_ids"] for row in rows} == {
        parse({"prompt": text}).key: [*whole[text][0], *whole[text][1]] for text in TEXTS[3:]
    }
    assert [reject["reason"] for reject in rejects_of(made.folder)] == ["token_mismatch"] * 3
    with pytest.raises(StageFailed, match=r"10\.0% of the rows rebuilt from text disagree"):
        run(TEXTS, max_mismatch_share=0.05, max_rejected_share=0.2, keep_truncated=False)


def test_14_the_mask_needs_no_markers_in_the_template(run: Runner) -> None:
    run.stub.default = Reply(thinking="t", answer="yo", prompt_ids=(1, 2, 3), output_ids=(9, THINK_CLOSE, 10, END))
    assert [row["loss_mask"] for row in rows_of(run(THREE))] == [[0, 0, 0, 1, 1, 1, 1]] * 3


def test_14_rows_without_supervised_tokens_never_make_a_data_set(run: Runner) -> None:
    run.stub.default = Reply(output_ids=())
    with pytest.raises(StageFailed, match=r"3 of 3 .*empty_output"):
        run(THREE, max_rejected_share=0.99)


def test_15_only_the_newest_turn_is_supervised(run: Runner) -> None:
    """The template prints thinking on the last turn alone; texts stand for tokens, one id a word."""
    words = {"u1": 11, "R1": 12, "a1": 13, "u2": 14, "R2": 15, "a2": 16}

    def decide(body: dict[str, Any], number: int) -> Reply:
        assert not any(key.startswith("reasoning") for turn in body["messages"] for key in turn)
        n = 1 + sum(turn["role"] == "assistant" for turn in body["messages"])
        seen = [words[turn["content"]] for turn in body["messages"]]
        output = [words[f"R{n}"], THINK_CLOSE, words[f"a{n}"], END]
        return Reply(thinking=f"R{n}", answer=f"a{n}", prompt_ids=seen, output_ids=output)

    run.stub.on_chat(decide)
    row = conversation(("user", "u1"), ("assistant", "old"), ("user", "u2"))
    rows = [r for r in rows_of(run([row, "u1", "u2"])) if r["key"] == parse(row).key]
    masked = [[i for i, on in zip(r["input_ids"], r["loss_mask"], strict=True) if on] for r in rows]
    assert masked == [[12, THINK_CLOSE, 13, END], [15, THINK_CLOSE, 16, END]]
    assert rows[1]["input_ids"][:3] == [11, 13, 14]  # a1 is there without its thinking, and not supervised


def test_16_the_mask_is_unshifted(run: Runner) -> None:
    run.stub.default = Reply(prompt_ids=(1, 2, 3), output_ids=(10, 11, 2), spelling=None)
    rows = rows_of(run(THREE, reasoning=False))
    assert [(row["input_ids"], row["loss_mask"]) for row in rows] == [([1, 2, 3, 10, 11, 2], [0, 0, 0, 1, 1, 1])] * 3


def toy_tokenizer(folder: Path) -> Path:
    """Ten base tokens; the files declare three special ones with gaps, the library packs them: 10, 11, 12."""
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(10)}, unk_token="0"))
    names = ["<think>", "</think>", "[PAD]"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    declared = {13: "<think>", 14: "</think>", 25: "[PAD]"}
    config = {"added_tokens_decoder": {str(i): {"content": name} for i, name in declared.items()}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_19_special_ids_that_load_packed_abort_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        check_loaded(toy_tokenizer(tmp_path))
    for name, ids in {"<think>": (10, 13), "</think>": (11, 14), "[PAD]": (12, 25)}.items():
        assert name in str(caught.value)
        assert all(str(token) in str(caught.value) for token in ids)


def test_19_a_server_with_packed_specials_aborts_by_name(run: Runner) -> None:
    run.stub.on_tokenize(lambda body: [7])
    with pytest.raises(InputError, match=r"<think> is 504.*</think> is 505"):
        run(THREE)
    assert not run.stub.asked()


def test_67_twice_in_one_process_and_inside_a_running_loop(run: Runner, tmp_path: Path) -> None:
    made = [run.at(tmp_path / str(i))(TEXTS[:5]) for i in range(2)]

    async def inside() -> Any:
        return run.at(tmp_path / "2")(TEXTS[:5])

    made.append(asyncio.run(inside()))
    assert len({artifact.content for artifact in made}) == 1
