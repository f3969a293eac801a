"""The traces stage: an ordered selection from the row pool as one Parquet file.

`traces.parquet`, one row a trace, training rows first, then validation, each in prompt-key order (so its
bytes do not depend on the order in which answers arrived):

| column | |
|---|---|
| key, split, kind | string: the prompt's |
| input_ids | list<int32>: prompt and output as the server gave them |
| loss_mask | list<int8>: 1 on generated tokens, unshifted |
| prompt_tokens | int32: how many of input_ids are the prompt |
| think_end | int32: index in input_ids of `</think>`, -1 when the thinking was cut |
| finish_reason, thinking, answer | string |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream import atomic, verifier
from slipstream.artifact import Artifact, claim, stage_key
from slipstream.config import RunConfig
from slipstream.digest import digest
from slipstream.errors import StageFailed
from slipstream.progress import Report
from slipstream.serving import Endpoint
from slipstream.traces import prompt_set, splits
from slipstream.traces.generate import Outcome, generate
from slipstream.traces.pool import TracePool, open_pool
from slipstream.traces.prompts import Prompt
from slipstream.traces.trace import Trace, rejection

if TYPE_CHECKING:
    import pyarrow as pa

STAGE, VERSION = "traces", 1
POLICY = {"reasoning", "keep_truncated"}
ROW_GROUP = 256
Servers = Callable[[Path], AbstractContextManager[Sequence[Endpoint]]]


def _sampling(config: RunConfig) -> dict[str, Any]:
    """What decides the answer to a prompt besides the prompt itself."""
    recipe = {name: value for name, value in config.traces.recipe().items() if name not in POLICY}
    served = {"dtype": config.verifier.dtype, "reasoning_parser": config.verifier.reasoning_parser}
    return {"verifier": verifier.identity(config.verifier), **served, **recipe}


def key(config: RunConfig, prompts: Artifact) -> str:
    """The folder key for these prompts."""
    return stage_key(STAGE, VERSION, _recipe(config), {"prompts": prompts.parts["traced"]})


def _recipe(config: RunConfig) -> dict[str, Any]:
    policy = {name: getattr(config.traces, name) for name in sorted(POLICY)}
    return {**_sampling(config), **policy}


def run(
    workdir: Path,
    config: RunConfig,
    prompts: Artifact,
    servers: Servers,
    report: Report,
    on_wait: Callable[[str], None] | None = None,
) -> Artifact:
    """Generates what is missing and writes the artifact.

    `servers(log_folder)` is a context manager that gives endpoints; it is entered only when a trace is missing.
    Raises StageFailed when a larger share than `traces.max_rejected_share` has no usable trace.
    """
    recipe, inputs = _recipe(config), {"prompts": prompts.parts["traced"]}
    name = stage_key(STAGE, VERSION, recipe, inputs)
    with claim(workdir, STAGE, name, on_wait) as folder:
        if (done := folder.complete()) is not None:
            return done
        folder.reopen()
        wanted = {s: list(prompt_set.load(prompts, s)) for s in (splits.TRAIN, splits.VALIDATION)}
        every = [prompt for part in wanted.values() for prompt in part]
        with open_pool(workdir, digest(_sampling(config))) as pool:
            missing = set(pool.missing(prompt.key for prompt in every))
            outcome = Outcome()
            if missing:
                asked = [prompt for prompt in every if prompt.key in missing]
                with servers(folder.path / "logs") as endpoints:
                    outcome = generate(asked, endpoints, config.traces, pool, report)
            selection = Selection(config, folder.path)
            selection.write(wanted, pool, outcome.failed)
        if selection.rejects and len(selection.rejects) > config.traces.max_rejected_share * len(every):
            first = selection.rejects[0]
            raise StageFailed(
                f"traces: {len(selection.rejects)} of {len(every)} prompts have no usable trace, more than "
                f"max_rejected_share {config.traces.max_rejected_share:g}; the first is {first['key']} "
                f"({first['reason']}), all are in {folder.path / 'rejects.jsonl'}"
            )
        return folder.commit(
            version=VERSION,
            recipe=recipe,
            inputs=inputs,
            content=selection.content(),
            files=["traces.parquet", "rejects.jsonl"],
            counts=selection.counts(),
            work={
                "requested": outcome.requested,
                "reused": len(every) - len(missing),
                "output_tokens_per_s": round(outcome.output_tokens / outcome.seconds, 1) if outcome.seconds else None,
            },
        )


class Selection:
    """Writes the artifact's files from the pool, one row group at a time."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.folder = folder
        self.config = config
        special = verifier.special_tokens(verifier.folder_of(config.verifier))
        self.think_close = special.get(verifier.THINK_CLOSE)
        self.eos = verifier.load_shape(config.verifier).eos_token_ids
        self.rejects: list[dict[str, Any]] = []
        self.rows = dict.fromkeys((splits.TRAIN, splits.VALIDATION), 0)
        self.tokens = self.supervised = self.truncated = 0
        self._hash = hashlib.sha256()

    def write(self, wanted: dict[str, list[Prompt]], pool: TracePool, failed: dict[str, str]) -> None:
        """Writes `traces.parquet` and `rejects.jsonl`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = _schema()
        with (
            atomic.replacing(self.folder / "traces.parquet") as temporary,
            pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
        ):
            group: list[dict[str, Any]] = []
            for row in self._rows(wanted, pool, failed):
                group.append(row)
                if len(group) == ROW_GROUP:
                    writer.write_table(pa.Table.from_pylist(group, schema))
                    group = []
            if group:
                writer.write_table(pa.Table.from_pylist(group, schema))
        lines = "".join(json.dumps(reject, ensure_ascii=True) + "\n" for reject in self.rejects)
        atomic.write_bytes(self.folder / "rejects.jsonl", lines.encode())

    def _rows(
        self, wanted: dict[str, list[Prompt]], pool: TracePool, failed: dict[str, str]
    ) -> Iterator[dict[str, Any]]:
        for split, prompts in wanted.items():
            by_key = {prompt.key: prompt for prompt in prompts}
            found = set()
            for trace in pool.get(by_key):
                found.add(trace.key)
                reason = rejection(
                    trace,
                    self.think_close,
                    self.config.traces.reasoning,
                    self.config.traces.keep_truncated,
                    self.eos,
                )
                if reason is not None:
                    self._reject(by_key[trace.key], reason)
                    continue
                yield self._row(split, by_key[trace.key], trace)
            for key in by_key.keys() - found:
                self._reject(by_key[key], failed.get(key, "no answer"))
        self.rejects.sort(key=lambda reject: str(reject["key"]))

    def _reject(self, prompt: Prompt, reason: str) -> None:
        self.rejects.append({"key": prompt.key, "id": prompt.id, "reason": reason})

    def _row(self, split: str, prompt: Prompt, trace: Trace) -> dict[str, Any]:
        boundary = trace.boundary(self.think_close)
        self.rows[split] += 1
        self.tokens += len(trace.prompt_ids) + len(trace.output_ids)
        self.supervised += len(trace.output_ids)
        self.truncated += trace.finish_reason == "length"
        self._hash.update(f"{split}:{trace.key}:{len(trace.prompt_ids)}:{digest(trace.input_ids)}\n".encode())
        return {
            "key": trace.key,
            "split": split,
            "kind": prompt.kind,
            "input_ids": trace.input_ids,
            "loss_mask": trace.loss_mask(),
            "prompt_tokens": len(trace.prompt_ids),
            "think_end": -1 if boundary is None else len(trace.prompt_ids) + boundary,
            "finish_reason": trace.finish_reason,
            "thinking": _encodable(trace.thinking),
            "answer": _encodable(trace.answer),
        }

    def content(self) -> str:
        """Names the rows that later stages read: order, split, token ids, where the answer begins."""
        return self._hash.hexdigest()[:32]

    def counts(self) -> dict[str, int]:
        """What the artifact holds."""
        return {
            **self.rows,
            "rejected": len(self.rejects),
            "truncated": self.truncated,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
        }


def _encodable(text: str | None) -> str | None:
    """`text` with what UTF-8 cannot hold (half of a surrogate pair) replaced; training reads the ids, not this."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def _schema() -> pa.Schema:
    import pyarrow as pa

    text = ("key", "split", "kind")
    fields = [(name, pa.string()) for name in text]
    fields += [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8()))]
    fields += [("prompt_tokens", pa.int32()), ("think_end", pa.int32())]
    fields += [(name, pa.string()) for name in ("finish_reason", "thinking", "answer")]
    return pa.schema(fields, metadata={"slipstream_schema": "1"})


def read(artifact: Artifact, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The artifact's rows in order, only `columns` of them."""
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(artifact.folder / "traces.parquet").iter_batches(ROW_GROUP, columns=list(columns)):
        yield from batch.to_pylist()
