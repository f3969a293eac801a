"""The command line: `slipstream run | plan | import | verify | export | publish | doctor | report`.

Errors are one sentence on stderr.  Exit status: 0 done, 1 failed or damaged, 2 wrong input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.artifact import MANIFEST
from slipstream.errors import Damaged, InputError, SlipstreamError

if TYPE_CHECKING:
    from rich.progress import TaskID


def _run(args: argparse.Namespace) -> int:
    from slipstream.config import load_config, rehearsal
    from slipstream.plan import preflight

    config = load_config(args.config)
    if args.rehearse:
        config = rehearsal(config)
    preflight(config)
    from flows.embedded import prefect_api

    with prefect_api(config.root):
        from flows.train_drafter import train_drafter  # after the settings stand in the environment

        train_drafter(config)
    folder = config.root / "runs" / config.name
    _print_headline(folder)
    if args.rehearse:
        print(f"Rehearsed {args.config}: look at {folder / 'report.html'}, logs are in {config.root / 'logs'}")
        print(f"and beside each stage; then start the real run with: slipstream run {args.config}")
    return 0


def _print_headline(folder: Path) -> None:
    from slipstream.acceptance.report import headline

    report = json.loads((folder / "report.json").read_text())
    print()
    for name, value in headline(report):
        print(f"{name:26} {value}")
    print(f"{'report':26} {folder / 'report.html'}")


def _plan(args: argparse.Namespace) -> int:
    from slipstream.config import load_config
    from slipstream.plan import plan

    estimate = plan(load_config(args.config))
    if args.json:
        print(json.dumps(estimate, indent=2))
        return 0
    print(f"{estimate['name']}: {estimate['prompts']:,} prompts, verifier {estimate['verifier']}")
    print(f"  traced tokens        {estimate['tokens']:,}")
    print(f"  hidden states        {estimate['bytes_per_token']:,} bytes a token (layer ids {estimate['layer_ids']})")
    print(f"  feature store        {estimate['feature_store_bytes'] / 1e9:.1f} GB ({estimate['store']})")
    print(f"  checkpoints          {estimate['checkpoint_bytes'] / 1e9:.1f} GB")
    print(f"  free disk            {estimate['disk_free_bytes'] / 1e9:.1f} GB")
    print(f"  GPUs                 {estimate['gpus']} ({estimate['gpus_here']} here)")
    for name, hours in estimate["hours"].items():
        print(f"  {name:20} {hours:.2f} h")
    print(f"  fits here            {'yes' if estimate['fits'] else 'no: ' + '; '.join(estimate['reasons'])}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from slipstream import artifact

    folder = args.path.resolve()
    if not folder.is_dir() or not (folder / MANIFEST).exists():
        print(f"{args.path}: not an artifact (no {MANIFEST} in it)", file=sys.stderr)
        return 2
    try:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            row = bar.add_task("verifying", total=None)
            damage = artifact.verify(
                folder, deep=args.deep, on_file=lambda done, total: bar.update(row, completed=done, total=total)
            )
    except Damaged as error:
        print(error, file=sys.stderr)
        return 1
    for item in damage:
        print(f"{item.path}: {item.reason}")
    if damage and args.deep and not args.keep:
        aside = artifact.quarantine(folder, damage)
        print(f"set aside under {aside}; run the configuration again and only these files are made again")
    files = len(artifact.read_manifest(folder).files)
    how = "checksums" if args.deep else "existence and size"
    print(
        f"{args.path}: {len(damage)} of {files} files damaged"
        if damage
        else f"{args.path}: {files} files intact ({how})"
    )
    return 1 if damage else 0


def _workdir() -> Path:
    return Path(os.environ.get("SLIPSTREAM_WORKDIR") or "work").absolute()


def _doctor(args: argparse.Namespace) -> int:
    from slipstream.doctor import examine

    findings = examine(Path.cwd(), _workdir())
    for finding in findings:
        mark = "!!" if finding.advice else "ok"
        print(f"{mark} {finding.what}: {finding.state}{f' -> {finding.advice}' if finding.advice else ''}")
    return 1 if any(finding.advice for finding in findings) else 0


def _report(args: argparse.Namespace) -> int:
    root = _workdir()
    named = Path(args.run)
    folder = named if (named / "report.json").exists() else root / "runs" / args.run
    if not (folder / "report.json").exists():
        known = sorted(p.name for p in (root / "runs").glob("*") if (p / "report.json").exists())
        raise InputError(f"{folder}: no finished run there; known runs are {', '.join(known) or 'none'}")
    _print_headline(folder.resolve())
    return 0


def _import(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from slipstream import progress
    from slipstream.config import load_config
    from slipstream.imports import stage
    from slipstream.imports.measure import Said

    config = load_config(args.config)
    said = Said(args.layer_ids, args.convention, args.final_state, args.probe)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def report(now: progress.Progress) -> None:
            if now.unit not in tasks:
                tasks[now.unit] = bar.add_task(now.unit, total=now.total)
            bar.update(tasks[now.unit], completed=now.done)

        made = stage.run(config.root, config, args.store, said, report)
    print(f"{args.store}: {stage.headline(made)}")
    for line in made.mappings:
        print(line)
    print(f"traces    {made.traces.path}")
    print(f"features  {made.features.path}")
    print("to go on from here, set in the configuration and start `slipstream run` with it:")
    print(f"  traces:\n    imported: {made.traces.path}")
    return 0


def _export(args: argparse.Namespace) -> int:
    from slipstream.drafter import engines, export, opened, source

    found = source.find(args.drafter, args.epoch, _workdir())
    drafter = opened.read(found.folder, args.layer_ids)
    if args.verifier:
        drafter = source.for_verifier(drafter, args.verifier)
    dtype = args.dtype or source.dtype_of(found, drafter)
    export.export(drafter, args.output, args.form, dtype, args.embeddings, args.engine, found.facts)
    names = drafter.tensors.keys() - ({opened.EMBEDDING} if not args.embeddings else set())
    maps = sum(name in opened.MAPS for name in names)
    print(f"{args.output}: {args.form} form in {dtype}, {len(names) - maps} tensors and {maps} maps")
    for engine in engines.ENGINES:
        reason = engines.refusal(drafter.config, args.form, engine)
        if reason is None and engine == "sglang" and args.engine != "sglang":
            reason = (why := engines.needs_sglang_export(drafter.config)) and f"export it with --engine sglang ({why})"
        print(f"  {engine:8} {'loads it' if reason is None else f'does not: {reason}'}")
    print(f"  how to serve it: {args.output / export.CARD}")
    return 0


def _publish(args: argparse.Namespace) -> int:
    from slipstream import publish
    from slipstream.drafter import source

    root = _workdir()
    found = source.find(args.drafter, args.epoch, root)
    with publish.prepared(
        found, args.repo, root / "publish", args.form, args.dtype, args.embeddings, args.verifier, args.layer_ids
    ) as ready:
        print(f"{args.repo}{' (private)' if args.private else ''}")
        for name, size in ready.files:
            print(f"  {name:20} {size:>16,} bytes")
        print("\n".join(f"  | {line}" for line in ready.text.splitlines()[:16]))
        if "/" not in ready.base_model:
            print(f"the verifier is only known as {ready.base_model}: say --verifier org/name if it is on the Hub")
        if not args.push:
            print("nothing was uploaded: repeat the command with --push")
            return 0
        print(f"uploaded: {publish.push(ready, args.private)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slipstream", description="Train EAGLE-3 drafters and measure them on vLLM.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a configuration from prompts to the verdict")
    run.add_argument("config", type=Path)
    run.add_argument("--rehearse", action="store_true", help="10 prompts, 3 epochs, same code path, own work directory")
    run.set_defaults(do=_run)

    plan = commands.add_parser("plan", help="what a configuration will cost and whether it fits")
    plan.add_argument("config", type=Path)
    plan.add_argument("--json", action="store_true")
    plan.set_defaults(do=_plan)

    verify = commands.add_parser("verify", help="check a stage folder: exit 0 intact, 1 damaged, 2 not an artifact")
    verify.add_argument("path", type=Path)
    verify.add_argument("--deep", action="store_true", help="compare checksums; set damaged files aside for a rerun")
    verify.add_argument("--keep", action="store_true", help="with --deep: only look")
    verify.set_defaults(do=_verify)

    take = commands.add_parser("import", help="take an existing hidden-state store into the work directory")
    take.add_argument("store", type=Path, help="speculators' v1 folder (data_<i>.pt) or a data set with hidden_states/")
    take.add_argument("config", type=Path)
    take.add_argument(
        "--layer-ids", type=int, nargs="+", metavar="ID", help="what each state of the store is, in order"
    )
    take.add_argument(
        "--convention",
        choices=["vllm", "output"],
        help="what id k names: the state before layer k (vllm), or the output of layer k, as speculators' v1 had it",
    )
    take.add_argument(
        "--final-state", choices=["before", "after"], help="whether the last state was taken before the final norm"
    )
    take.add_argument(
        "--no-probe", dest="probe", action="store_false", help="start no server: the layers are not measured"
    )
    take.set_defaults(do=_import)

    export = commands.add_parser("export", help="write a drafter, ours or any other, in a form that servers load")
    export.add_argument("drafter", help="a run, a drafter's folder, one of its epochs, or any EAGLE-3 checkpoint")
    export.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")
    _describe_export(export)
    export.add_argument(
        "--engine", choices=["vllm", "sglang"], help="write it for this server, and refuse what it does not read"
    )
    export.set_defaults(do=_export)

    publish = commands.add_parser("publish", help="show, or with --push upload, a drafter for the Hugging Face Hub")
    publish.add_argument("drafter", help="a run, a drafter's folder, one of its epochs, or any EAGLE-3 checkpoint")
    publish.add_argument("--repo", required=True, metavar="ORG/NAME", help="the repository; it is made when absent")
    publish.add_argument("--push", action="store_true", help="upload (token in HF_TOKEN); without it only show")
    publish.add_argument("--private", action="store_true", help="a repository that is made is private")
    _describe_export(publish)
    publish.set_defaults(do=_publish)

    doctor = commands.add_parser("doctor", help="check environments, devices and disk of this machine")
    doctor.set_defaults(do=_doctor)

    report = commands.add_parser("report", help="show the figures of a finished run")
    report.add_argument("run", nargs="?", default="latest", help="name or folder of a run")
    report.set_defaults(do=_report)
    return parser


def _describe_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epoch", metavar="N|best", help="which epoch of a run; without it the best")
    parser.add_argument("--form", choices=["flat", "speculators"], default="flat", help="flat: vLLM and SGLang")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="type of the weights")
    parser.add_argument(
        "--no-embeddings", dest="embeddings", action="store_false", help="servers share the verifier's embedding"
    )
    parser.add_argument("--verifier", metavar="NAME", help="the verifier's name on the Hub, or its folder")
    parser.add_argument(
        "--layer-ids",
        type=int,
        nargs="+",
        metavar="ID",
        help="auxiliary layers, instead of those that the checkpoint says",
    )


def main() -> None:
    """Entry point of the `slipstream` command."""
    args = _parser().parse_args()
    try:
        sys.exit(args.do(args))
    except InputError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        sys.exit(2)
    except SlipstreamError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
