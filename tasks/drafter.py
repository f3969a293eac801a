"""Task: training, with its curves after every epoch and a link to every epoch's exports."""

from __future__ import annotations

import json
from pathlib import Path

from prefect import task
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.logging import get_run_logger

from slipstream import serving
from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.drafter import page, stage, warm_start
from tasks.progress import reporting
from tasks.stage import options, show, wait_logger


@task(
    name="train-drafter",
    **options(stage.STAGE, lambda i: stage.key(i["config"], i["features"], i["vocabulary"])),
)
def train(config: RunConfig, features: Artifact, vocabulary: Artifact) -> Artifact:
    """A trained drafter, every epoch exported, the best one named."""
    log, cache = config.root / "logs" / "generation-ahead.log", serving.cache_folder(config.servers, config.root)
    if config.features.store != "none":  # else an extraction server runs beside training already
        serving.start_ahead(
            config.verifier, config.servers, serving.generation_server(), log, cache
        )  # acceptance's baseline
    with reporting("drafter-progress", "Training") as report:
        artifact = stage.run(config.root, config, features, vocabulary, report, wait_logger(), _show_epochs)
    _show_epochs(artifact.folder)
    counts = artifact.manifest().counts
    for epoch, length in counts["accepted_length"].items():
        best = " (best)" if epoch == counts["best_epoch"] else ""
        create_link_artifact(
            stage.served_folder(artifact.folder, epoch).as_uri(),
            link_text=f"epoch {epoch}{best}",
            key=f"drafter-epoch-{epoch}",
            description=f"Accepted length, replayed on validation rows: {length}",
        )
    if (begun := artifact.folder / warm_start.FILE).is_file():
        started = f"What became of each tensor of {config.drafter.init_from}"
        create_table_artifact(json.loads(begun.read_text()), key="drafter-warm-start", description=started)
    return show(artifact, "drafter", "Drafter")


def _show_epochs(folder: Path) -> None:
    """The artifact `drafter-training`: a table of the epochs so far, and the curves.

    A server that does not take it ends no training.
    """
    try:
        create_markdown_artifact(page.markdown(folder), key="drafter-training", description=f"Training in {folder}")
    except Exception as error:
        get_run_logger().warning("drafter-training could not be shown: %s", error)
