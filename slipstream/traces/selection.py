"""The artifact's rows out of the pool: in order of prompt key, judged by the rules, a batch at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from slipstream import atomic
from slipstream.config import TracesConfig
from slipstream.digest import digest_tokens
from slipstream.errors import StageFailed
from slipstream.traces import sampling, splits, table
from slipstream.traces.generate import Outcome
from slipstream.traces.pool import TracePool, batches
from slipstream.traces.prompts import Prompt
from slipstream.traces.rules import Rules
from slipstream.traces.samples import Chooser
from slipstream.traces.summary import Summary
from slipstream.traces.trace import Trace

REJECTS = "rejects.jsonl"
NO_ANSWER = "no answer"
FOLLOWS_REJECTED = "follows_rejected_turn"  # its history holds what was rejected


class Selection:
    """Writes `traces.parquet` and `rejects.jsonl`; every prompt's turns end in exactly one of them."""

    def __init__(self, config: TracesConfig, rules: Rules, folder: Path) -> None:
        self._config, self._rules, self._folder = config, rules, folder
        self.summary = Summary()
        self.rows = dict.fromkeys((splits.TRAIN, splits.VALIDATION), 0)
        self.first_reject: dict[str, Any] | None = None
        self.samples = Chooser()
        self._hash = hashlib.sha256()

    def write(self, prompts: dict[str, Iterable[Prompt]], pool: TracePool) -> None:
        """Writes the files; `prompts` by split, each in key order."""
        with (
            table.writing(self._folder) as rows,
            atomic.replacing(self._folder / REJECTS) as temporary,
            temporary.open("w", encoding="ascii") as rejects,
        ):
            for split, part in prompts.items():
                for batch in batches(part):
                    self._batch(split, batch, pool, rows, rejects)

    def _batch(self, split: str, batch: list[Prompt], pool: TracePool, rows: table.Writer, rejects: IO[str]) -> None:
        keys = {prompt.key: sampling.row_key(self._config, prompt.key) for prompt in batch}
        complete, errors = pool.get(list(keys.values())), pool.errors(list(keys.values()))
        for prompt in batch:
            turns = complete.get(keys[prompt.key])
            if turns is None:
                self._reject(prompt, 0, errors.get(keys[prompt.key], NO_ANSWER), rejects)
            first, unusable = True, False
            for trace in turns or ():
                self.summary.answer(trace)
                reason = FOLLOWS_REJECTED if unusable else self._rules.rejection(trace)
                if reason is not None:
                    unusable = True
                    self._reject(prompt, trace.turn, reason, rejects)
                    continue
                self._accept(split, prompt, trace, rows)
                self.summary.accept(prompt.kind, trace, self._rules.thinking_tokens(trace), first)
                first = False

    def _reject(self, prompt: Prompt, turn: int, reason: str, rejects: IO[str]) -> None:
        where = {"file": prompt.file, "row": prompt.row, "id": prompt.id}
        reject = {"key": prompt.key, "turn": turn, **where, "reason": reason}
        rejects.write(json.dumps(reject) + "\n")
        self.first_reject = self.first_reject or reject
        self.summary.reject(prompt.kind, reason)

    def _accept(self, split: str, prompt: Prompt, trace: Trace, rows: table.Writer) -> None:
        rows.add(split, prompt, trace, trace.boundary(self._rules.think_close))
        self.rows[split] += 1
        name = f"{split}:{trace.key}:{trace.turn}:{len(trace.prompt_ids)}:{digest_tokens(trace.input_ids)}\n"
        self._hash.update(name.encode())
        self.samples.offer(split, prompt.kind, trace)

    def content(self) -> str:
        """Names the rows that later stages read: order, split, token ids, where the answer begins."""
        return self._hash.hexdigest()[:32]

    def counts(self) -> dict[str, int]:
        """What the artifact holds."""
        total = self.summary.total
        return {
            **self.rows,
            "rejected": total.rejected,
            "truncated": total.truncated,
            "conversations": total.conversations,
            "tokens": total.prompt_tokens + total.output_tokens,
            "supervised_tokens": total.output_tokens,
        }

    def check(self, outcome: Outcome) -> None:
        """Raises StageFailed when too much was lost, cut or not exact; nothing that is recorded is thrown away."""
        rejected, rows = self.summary.total.rejected, self.summary.total.rows
        turns = rejected + rows
        first = self.first_reject
        if (first and rejected > self._config.max_rejected_share * turns) or not rows:
            detail = f"the first is {self._name(first)} ({first['reason']})" if first else "there was nothing to answer"
            raise StageFailed(
                f"traces: {rejected} of {turns} have no usable trace, more than max_rejected_share "
                f"{self._config.max_rejected_share:g}; {detail}{self._advice()}, all are in {self._folder / REJECTS}"
            )
        if outcome.stopped and first:
            raise StageFailed(
                f"traces: {outcome.failed} prompts failed, so the rest was not asked; the first is "
                f"{self._name(first)} ({first['reason']}), all are in {self._folder / REJECTS}"
            )
        if self.summary.mismatch_share() > self._config.max_mismatch_share:
            raise StageFailed(
                f"traces: {self.summary.mismatch_share():.1%} of the rows rebuilt from text disagree with the server's "
                f"token counts, more than max_mismatch_share {self._config.max_mismatch_share:g}; use a server that "
                "returns token ids"
            )
        if self.summary.truncated_share > self._config.max_truncated_share:
            raise StageFailed(
                f"traces: {self.summary.truncated_share:.1%} of the answers were cut by max_tokens "
                f"{self._config.max_tokens}, more than max_truncated_share {self._config.max_truncated_share:g}; "
                "raise traces.max_tokens (and verifier.max_model_len)"
            )

    def _name(self, reject: dict[str, Any]) -> str:
        return f"{reject['key']} from {reject['file'] or 'unknown'} row {reject['row']}"

    def _advice(self) -> str:
        if self.summary.reasons["no_reasoning"] < self.summary.total.rejected / 2:
            return ""
        return (
            ": start the server with --reasoning-parser (verifier.reasoning_parser), or set traces.reasoning to false"
        )
