"""What the training process is told: one JSON file, so that it can be started by hand as well.

python -m slipstream.drafter.worker job.json
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from slipstream.config import DrafterConfig, DraftShape
from slipstream.features.stream import Streaming


class Job(BaseModel):
    """One training: paths are absolute, `layer_ids` are the auxiliary ones only.

    With `streaming` the states come from its servers, without it from the files of `features`: `checked_reads` is the
    share of them whose checksum is compared, `read_ahead` how many samples the disk reads ahead.
    `shape` is the decoder's, whether configured or not (`drafter.shape`).
    `final_state` is what the store says of its last state: before the final norm or after it (`features.recipe`).
    """

    model_config = ConfigDict(frozen=True)
    verifier: str
    features: str
    vocabulary: str
    checkpoints: str
    metrics: str
    layer_ids: list[int]
    hidden_size: int
    vocab_size: int
    train_rows: int
    rows: int
    final_state: str
    shape: DraftShape
    drafter: DrafterConfig
    checked_reads: float = 1.0
    read_ahead: int = 0
    streaming: Streaming | None = None

    @property
    def train_ratio(self) -> float:
        """The ratio at which speculators cuts its data set exactly after the training rows."""
        return (self.train_rows + 0.5) / self.rows

    @staticmethod
    def load(path: Path) -> Job:
        """The job in a JSON file."""
        return Job.model_validate_json(path.read_bytes())
