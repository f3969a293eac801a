"""Writes prompts of the pocket curriculum: `python -m slipstream.pocket.prompts --count N --seed S --out FILE.jsonl`.

One JSON object a line, the form that the traces stage reads; `kind` and `answer` travel along for checking:
`{"id": "add-1f2e3d4c", "messages": [{"role": "user", "content": …}], "kind": …, "answer": …}`.
The file appears whole or not at all.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from slipstream.pocket.curriculum import Task, generate


def line(task: Task) -> str:
    """The task as one line of JSON, without the line's end."""
    message = {"role": "user", "content": task.prompt}
    return json.dumps({"id": task.id, "messages": [message], "kind": task.kind, "answer": task.answer})


def write(tasks: Sequence[Task], path: Path) -> None:
    """Writes `path` through a temporary name beside it, then fsync and rename."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(line(task) + "\n" for task in tasks)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m slipstream.pocket.prompts", description=__doc__)
    parser.add_argument("--count", type=int, required=True, help="how many distinct prompts, evenly over the kinds")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same prompts")
    parser.add_argument("--out", type=Path, required=True, help="the JSON lines file to write")
    parser.add_argument("--held-out", action="store_true", help="only prompts that the verifier never saw in training")
    args = parser.parse_args(argv)
    if args.count < 1:
        parser.error("--count must be at least 1")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write(generate(args.count, args.seed, held_out=True if args.held_out else None), args.out)


if __name__ == "__main__":
    main()
