"""The page about a traces artifact and its Markdown: figures, escaping, size."""

from __future__ import annotations

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from slipstream.traces import report

EVIL = '</span></pre><script>alert("x")</script><img src=x onerror=alert(1)>{{ 7 * 7 }}'
TALLY: dict[str, Any] = {
    "rows": 190,
    "conversations": 180,
    "rejected": 10,
    "truncated": 4,
    "with_thinking": 190,
    "prompt_tokens": 12_345,
    "output_tokens": 1_000_000,
    "thinking_tokens": 750_000,
    "mean_output_tokens": 5263.2,
    "reasoning_share": 0.75,
}
EXECUTION: dict[str, Any] = {
    "answered": 150,
    "failed": 3,
    "requested": 160,
    "output_tokens": 900_000,
    "seconds": 600.0,
    "retried": 7,
    "absences": 1,
    "backoffs": 5,
    "stopped": False,
    "special_tokens": "equal",
    "throughput": {
        "bucket_s": 4.0,
        "tokens_per_s": [1500.0] * 150,
        "client_cpu_share": 0.0712,
        "server_limited_share": 0.993,
    },
}
SUMMARY: dict[str, Any] = {
    "total": TALLY,
    "domains": {"math": TALLY | {"rows": 150}, "code": TALLY | {"rows": 40, "reasoning_share": None}},
    "reasons": {"no_reasoning": 8, "http 400": 2},
    "answers": 198,
    "truncated_answers": 5,
    "truncated_share": 0.0253,
    "token_ids": {"server": 198},
    "mismatch_share": 0.0,
    "prompt_lengths": {"64": 190},
    "output_lengths": {"4096": 100, "5120": 90},
    "splits": {"train": 170, "validation": 20},
    "execution": EXECUTION,
}


def sample(text: str = "so", kind: str = "math") -> dict[str, Any]:
    """A rendered sample that says `text` three times."""
    segments = [{"kind": part, "text": text, "tokens": 7} for part in ("prompt", "thinking", "answer")]
    return {"key": "k" * 32, "kind": kind, "turn": 0, "finish_reason": "stop", "segments": segments}


def folder_with(folder: Path, samples: list[dict[str, Any]], **changes: Any) -> Path:
    """A stage folder as far as the page reads it."""
    (folder / "summary.json").write_text(json.dumps(SUMMARY | changes))
    (folder / "samples.json").write_text(json.dumps(samples))
    return folder


class Page(HTMLParser):
    """What a browser would see: table cells by row, spans by class, every tag and address."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.spans: list[tuple[str, str]] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        report.write(folder)
        self.html = (folder / "report.html").read_text()
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "span":
            self.spans.append((dict(attrs)["class"], ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data
        elif self.open[-2:] == ["pre", "span"]:
            name, text = self.spans[-1]
            self.spans[-1] = name, text + data


def test_the_page_says_what_happened(tmp_path: Path) -> None:
    page = Page(folder_with(tmp_path, [sample()]))
    assert not page.open
    told = {row[0]: row[1] for row in page.rows if len(row) == 2}
    expected = {
        "conversations": "180",
        "rows": "190 (170 train, 20 validation)",
        "turns answered": "198",
        "rejected": "10 (5.0%)",
        "answers cut by the token limit": "5 (2.5%)",
        "tokens in": "12,345",
        "tokens out": "1,000,000",
        "reasoning share of the output": "75.0%",
        "token ids": "198 server, 0 rebuilt, 0 mismatched",
        "mismatched of the rebuilt": "n/a",
        "special tokens of verifier and server": "equal",
        "requests answered": "160",
        "retried": "7",
        "back-offs": "5",
        "absences of servers": "1",
        "output tokens a second": "1,500",
        "CPU share of this client": "7.1%",
        "the server was the limit": "99.3% of the time",
    }
    assert {name: told[name] for name in expected} == expected
    assert [row for row in page.rows if len(row) == 3][1:] == [["no_reasoning", "8", "4.0%"], ["http 400", "2", "1.0%"]]
    domains = [row for row in page.rows if len(row) == 8]
    assert domains[1] == ["math", "150", "10", "4", "12,345", "1,000,000", "5,263.2", "75.0%"]
    assert domains[2][0] == "code"
    assert domains[2][-1] == "n/a"


def test_supervised_tokens_are_marked(tmp_path: Path) -> None:
    page = Page(folder_with(tmp_path, [sample("text")]))
    parts = ("prompt", "thinking", "answer")
    assert [span for span in page.spans if span[1]] == [(part, "text") for part in parts]
    assert 'title="prompt, not supervised"' in page.html
    assert 'title="thinking, supervised"' in page.html


def test_text_from_outside_is_escaped(tmp_path: Path) -> None:
    tally = {EVIL: TALLY}
    folder = folder_with(tmp_path, [sample(EVIL, EVIL)], domains=tally, reasons={EVIL: 1})
    page = Page(folder)
    assert not page.open
    assert "script" not in page.tags
    assert page.tags.count("img") == 2  # the pictures
    assert [text for name, text in page.spans if text] == [EVIL] * 3
    tokens = MarkdownIt("commonmark").enable("table").parse(report.markdown(folder))
    assert [token.content for token in tokens if token.type == "fence"] == [EVIL + "\n"] * 3
    assert not any(token.type.startswith("html") for token in tokens)
    inline = [child for token in tokens for child in token.children or ()]
    assert not any(child.type.startswith("html") for child in inline)
    assert sum(child.type == "image" for child in inline) == 2


def test_nothing_comes_from_the_network(tmp_path: Path) -> None:
    page = Page(folder_with(tmp_path, [sample()]))
    assert len(page.addresses) == 2
    for address in page.addresses:
        assert base64.b64decode(address.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")
    assert "http" not in page.html.replace("http 400", "")


def test_what_is_not_known_is_not_available(tmp_path: Path) -> None:
    nothing = {**dict.fromkeys(TALLY, 0), "mean_output_tokens": None, "reasoning_share": math.nan}
    throughput = {"client_cpu_share": None, "server_limited_share": math.nan}
    folder = folder_with(
        tmp_path,
        [],
        total=nothing,
        domains={},
        reasons={},
        prompt_lengths={},
        output_lengths={},
        execution={**EXECUTION, "seconds": 0.0, "throughput": throughput},
    )
    page = Page(folder)
    told = {row[0]: row[1] for row in page.rows if len(row) == 2}
    names = ("reasoning share of the output", "CPU share of this client", "the server was the limit")
    assert [told[name] for name in (*names, "output tokens a second")] == ["n/a"] * 4
    assert told["rejected"] == "0 (n/a)"
    assert "img" not in page.tags
    assert not re.search(r"\b(nan|None)\b", page.html + report.markdown(folder))


def test_when_every_answer_was_known(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, [sample()], execution=None)
    for text in (Page(folder).html, report.markdown(folder)):
        assert "Nothing was asked" in text
        assert "the server was the limit" not in text


def test_half_a_surrogate_pair_in_a_server_s_words(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, [sample()], reasons={"refused \ud83d": 2})
    assert ["refused ?", "2", "1.0%"] in Page(folder).rows
    assert "refused ?" in report.markdown(folder)


def test_rebuilt_rows_have_a_mismatch_share(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, [], token_ids={"mismatched": 1, "rebuilt": 3}, mismatch_share=0.25)
    told = {row[0]: row[1] for row in Page(folder).rows if len(row) == 2}
    assert told["token ids"] == "0 server, 3 rebuilt, 1 mismatched"
    assert told["mismatched of the rebuilt"] == "25.0%"


def test_the_markdown_has_the_same_figures_and_says_where_supervision_begins(tmp_path: Path) -> None:
    text = report.markdown(folder_with(tmp_path, [sample("text")]))
    assert "| rows | 190 (170 train, 20 validation) |" in text
    assert "| the server was the limit | 99.3% of the time |" in text
    assert "| math | 150 | 10 | 4 | 12,345 | 1,000,000 | 5,263.2 | 75.0% |" in text
    assert text.count("data:image/png;base64,") == 2
    assert text.index("prompt, 7 tokens") < text.index("▼ supervised from here: thinking, 7 tokens")
    assert text.count("▼") == 1


@pytest.mark.parametrize("text", ["```\n# out", "~~~~", "`" * 40, "````text\n```\n`", ""])
def test_no_text_ends_its_fence(tmp_path: Path, text: str) -> None:
    markdown = report.markdown(folder_with(tmp_path, [sample(text)]))
    fences = [token.content for token in MarkdownIt().parse(markdown) if token.type == "fence"]
    assert fences == [text + "\n"] * 3


@pytest.mark.parametrize("letter", ["x", "\U0001f600", "`", "<", "|"])
def test_the_markdown_stays_below_100_kb(tmp_path: Path, letter: str) -> None:
    many = {f"{letter * 200}{i}": TALLY for i in range(500)}
    folder = folder_with(
        tmp_path, [sample(letter * 2100, letter * 300)] * 5, domains=many, reasons=dict.fromkeys(many, 1)
    )
    text = report.markdown(folder)
    assert 10_000 < len(text.encode()) < 100_000
    assert "450 smaller domains are in summary.json" in text
    assert text.endswith("\n\nShortened here.\n") == (letter in "`\U0001f600")  # fences grow too


def test_the_stage_writes_its_page(run: Any) -> None:
    made = run([{"prompt": f"prompt {i}", "kind": "even" if i % 2 == 0 else "odd"} for i in range(20)])
    manifest = made.manifest()
    assert {"report.html", "samples.json", "summary.json"} <= manifest.files.keys()
    page = Page(made.folder)
    told = {row[0]: row[1] for row in page.rows if len(row) == 2}
    counts = manifest.counts
    total = counts["train"] + counts["validation"]
    assert told["rows"] == f"{total} ({counts['train']} train, {counts['validation']} validation)"
    assert told["requests answered"] == str(total)
    assert {row[0] for row in page.rows if len(row) == 8} == {"domain", "even", "odd"}
    shown = json.loads((made.folder / "samples.json").read_text())
    assert {row["kind"] for row in shown} == {"even", "odd"}
