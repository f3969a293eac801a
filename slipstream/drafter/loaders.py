"""What training reads: speculators' loaders over a checked store or a stream, with read-ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from speculators.train.dataloader import _worker_init_fn
from torch.utils.data import DataLoader, Dataset

from slipstream.drafter.batch_order import BatchOrder
from slipstream.drafter.interruption import outlive_first_request
from slipstream.drafter.job import Job
from slipstream.drafter.noise import Noise, WithEpoch
from slipstream.errors import Damaged
from slipstream.features.complete import repair
from slipstream.features.loader import StoreTransfer
from slipstream.features.read_ahead import ReadAhead, will_need
from slipstream.features.stream import StreamTransfer

Transfer = StoreTransfer | StreamTransfer


class Rows(Dataset[Any]):
    """speculators' data set without its silent way out: a row whose token ids differ ends the training.

    The requests for a batch of a stream are sent together.  With noise, an index comes with its epoch (`WithEpoch`).
    """

    def __init__(self, dataset: Any, transfer: Transfer, store: str, noise: Noise | None = None) -> None:
        self._dataset, self._transfer, self._store, self._noise = dataset, transfer, store, noise

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> int:
        """The row of the store that an index of this split means."""
        return int(self._dataset.start_file_idx + index)

    def lengths(self) -> list[int]:
        """Tokens of each row as training sees it: every token but the first has a state before it."""
        return [length - 1 for length in self._dataset.approx_lengths]

    def __getitem__(self, at: int | tuple[int, int]) -> Any:
        from speculators.train.recovery import SampleUnavailable

        epoch, index = at if isinstance(at, tuple) else (0, int(at))
        item = self._dataset[index]
        if isinstance(item, SampleUnavailable):
            row, store = self.row(index), Path(self._store)
            raise Damaged(f"{store}: the states of row {row} are of other tokens than its input_ids; {repair(store)}")
        if self._noise is not None:
            item["hidden_states"] = self._noise.add(item["hidden_states"], epoch, self.row(index))
        return item

    def __getitems__(self, indices: Sequence[int | tuple[int, int]]) -> list[Any]:
        if isinstance(self._transfer, StreamTransfer):
            self._transfer.begin(self.row(at[1] if isinstance(at, tuple) else int(at)) for at in indices)
        return [self[at] for at in indices]


def _announcer(rows: Rows, transfer: Transfer, num_workers: int) -> Callable[[int], None] | None:
    if isinstance(transfer, StoreTransfer):
        return lambda index: will_need(transfer.path(rows.row(index)))
    if num_workers == 0:
        return lambda index: transfer.begin([rows.row(index)])
    return None  # data workers ask for themselves, a batch at a time each


class Loader(DataLoader[Any]):
    """A loader whose epochs can begin at any batch of their `order`."""

    def __init__(self, rows: Rows, order: BatchOrder, **settings: Any) -> None:
        super().__init__(rows, **settings)
        self.rows, self.order = rows, order

    def rows_of(self, epoch: int, step: int) -> list[int]:
        """The store's rows in one batch of this rank."""
        return [self.rows.row(index) for index in self.order.batch(epoch, step)]


def _begin_worker(worker_id: int) -> None:
    """speculators' own settings of a data worker, and ours for a SIGTERM."""
    _worker_init_fn(worker_id)
    outlive_first_request()


def _rebuilt(loader: Any, transfer: Transfer, job: Job, noise: Noise | None) -> Loader:
    """`loader` (not yet started) with the same settings over checked rows, its files read ahead."""
    rows = Rows(loader.dataset, transfer, job.features, noise)
    order = BatchOrder(loader.batch_sampler)
    announce = _announcer(rows, transfer, loader.num_workers)
    sampler = ReadAhead(order, job.read_ahead, announce) if announce else order
    return Loader(
        rows,
        order,
        batch_sampler=WithEpoch(sampler, loader.batch_sampler) if noise else sampler,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        pin_memory=loader.pin_memory,
        collate_fn=loader.collate_fn,
        persistent_workers=loader.persistent_workers,
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=_begin_worker if loader.num_workers else None,
    )


def transfer_of(job: Job, dtype: torch.dtype) -> Transfer:
    """Where the job's states come from; raises Damaged for an incomplete store."""
    if job.streaming is not None:
        return StreamTransfer(Path(job.features), job.streaming)
    return StoreTransfer(Path(job.features), job.checked_reads, dtype)


def loaders(job: Job, target_layers: int, dtype: torch.dtype) -> tuple[Loader, Loader]:
    """The loaders of training and validation rows: packed to `drafter.sequence_length` tokens, states in `dtype`.

    `drafter.noise` is for training rows alone.
    """
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.dataloader import create_train_val_loaders

    transfer = transfer_of(job, dtype)
    made = create_train_val_loaders(
        data_path=job.features,
        total_seq_len=job.drafter.sequence_length,
        hidden_states_dtype=dtype,
        transfer=transfer,
        vllm_endpoint="",
        on_missing="raise",  # speculators asks no server itself
        verifier_name_or_path=job.verifier,
        request_timeout=None,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=job.hidden_size,
        num_target_layers=target_layers,
        num_workers=job.drafter.num_workers,
        prefetch_factor=4,
        preprocess=shift_batch,
        train_data_ratio=job.train_ratio,
        seed=job.drafter.seed,
    )
    drafter = job.drafter
    noise = Noise(drafter.noise, drafter.seed, dtype) if drafter.noise else None
    train, validation = made
    return _rebuilt(train, transfer, job, noise), _rebuilt(validation, transfer, job, None)
