"""What the trainer reads a feature store through: every sample checked against the index before a step uses it.

`StoreTransfer` is a speculators `HiddenStatesTransfer`.  A sample is read once, into memory of its own (a mapped file
would crash the trainer when a quarantine empties it in place), its XXH3-128 computed piece by piece while the bytes
are in the core's cache, and its tensors are views of that memory.  Always compared: the file's size, the number of
tokens and their digest, which speculators itself would only warn about.  Compared for the share
`features.checked_reads` of the rows (always the same ones): the checksum.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from hs_connectors import HiddenStatesTransfer

from slipstream import artifact
from slipstream.digest import digest_tokens
from slipstream.errors import Damaged
from slipstream.features import index
from slipstream.features.complete import repair, require_complete
from slipstream.features.layout import Tensor, tensors
from slipstream.features.sample import CODES, FP8, SCALES
from slipstream.features.sample_memory import SampleMemory

TOKENS_AT_ONCE = 16  # dequantised while they are in the core's cache
DTYPES = {kind.safetensors: name for name, kind in CODES.items()}


def is_checked(row: int, share: float) -> bool:
    """Whether the checksum of this row is compared: decided by a hash of the row alone, so the same in every epoch."""
    return xxhash.xxh3_64_intdigest(int(row).to_bytes(8, "little")) < share * 2.0**64


@dataclass(frozen=True)
class Expected:
    """What the index says of one row."""

    size: int
    checksum: str
    tokens: int
    key: str


class StoreTransfer(HiddenStatesTransfer):
    """Samples of the features artifact in `store`: `hidden_states` [tokens, layers, hidden] and `token_ids` [tokens].

    States of a native store keep their type (speculators' collation casts them while it copies); float8 ones are
    multiplied by their scales in `dtype`, as hs-connectors does.  A pickled one holds no more than its settings: each
    data worker opens the index itself.
    """

    def __init__(self, store: Path, checked: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> None:
        """Raises Damaged for a folder that is no finished artifact, or has lost files."""
        require_complete(store)
        self.__setstate__((store, checked, dtype))

    def __getstate__(self) -> tuple[Path, float, torch.dtype]:
        return self.store, self._checked, self._dtype

    def __setstate__(self, state: tuple[Path, float, torch.dtype]) -> None:
        self.store, self._checked, self._dtype = state
        self._memory = SampleMemory()
        self._rows: dict[int, Expected] | None = None

    def path(self, row: int) -> Path:
        """The file of a row."""
        return self.store / "hidden_states" / f"hs_{row}.safetensors"

    def expected(self, row: int) -> Expected:
        """What the index says of a row; raises Damaged for a row that it does not have."""
        if self._rows is None:
            self._rows = _read_index(self.store)
        try:
            return self._rows[row]
        except KeyError:
            raise Damaged(f"{self.store / index.FILE}: no row {row} of {len(self._rows)}; {self._repair()}") from None

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor]:
        """The sample of a row; raises Damaged when it is not what the index says."""
        expected, path = self.expected(file_idx), self.path(file_idx)
        data, checksum = self._read(path, expected.size, is_checked(file_idx, self._checked))
        if checksum is not None and checksum != expected.checksum:
            raise Damaged(f"{path}: checksum {checksum} instead of {expected.checksum}; {self._repair()}")
        try:
            held = tensors(data)
            token_ids = _as_tensor(held["token_ids"], torch.int64)
            states = self._states(held)
        except (ValueError, LookupError, TypeError) as error:
            raise Damaged(f"{path}: not a sample ({error}); {self._repair()}") from error
        if len(token_ids) != expected.tokens or digest_tokens(token_ids.numpy()) != expected.key:
            found = f"{len(token_ids)} tokens of digest {digest_tokens(token_ids.numpy())}"
            wanted = f"the {expected.tokens} of digest {expected.key}"
            raise Damaged(f"{path}: holds {found} instead of {wanted}; {self._repair()}")
        return {"hidden_states": states, "token_ids": token_ids}

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> None:
        """A store generates nothing."""

    def _repair(self) -> str:
        return repair(self.store)

    def _read(self, path: Path, size: int, hashed: bool) -> tuple[np.ndarray, str | None]:
        """The bytes of a file and, if `hashed`, their checksum; raises Damaged for another size than `size`."""
        data = self._memory.take(size)
        view, hasher, done = memoryview(data.data), xxhash.xxh3_128(), 0
        try:
            with path.open("rb", buffering=0) as file:
                while done < size and (count := file.readinto(view[done : done + artifact.READ_BYTES])):
                    if hashed:
                        hasher.update(view[done : done + count])
                    done += count
                if done < size or file.read(1):
                    actual = path.stat().st_size
                    raise Damaged(f"{path}: {actual} bytes instead of {size}; {self._repair()}")
        except OSError as error:
            raise Damaged(f"{path}: cannot be read ({error.strerror}); {self._repair()}") from error
        return data, hasher.hexdigest() if hashed else None

    def _states(self, held: dict[str, Tensor]) -> torch.Tensor:
        states = held["hidden_states"]
        if DTYPES[states.dtype] != FP8:
            return _as_tensor(states, getattr(torch, DTYPES[states.dtype]))
        return self._dequantised(states, _as_tensor(held[SCALES], torch.float32))

    def _dequantised(self, states: Tensor, scales: torch.Tensor) -> torch.Tensor:
        """code * scale, both in the compute dtype, as hs_connectors.fp8_utils does it.

        Codes are looked up in a table of the 256 values: torch's own conversion takes 2.6 times as long (291 against
        112 ms of CPU for 1,024 tokens of 4 x 7168).
        """
        table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(self._dtype)
        bits = {2: torch.int16, 4: torch.int32}[self._dtype.itemsize]
        memory = self._memory.take(states.data.size * self._dtype.itemsize)
        values = torch.from_numpy(memory).view(self._dtype).reshape(states.shape)
        values_bits, table_bits = values.view(bits).numpy(), table.view(bits).numpy()
        codes, factors = states.data.reshape(states.shape), scales.to(self._dtype)
        for start in range(0, len(codes), TOKENS_AT_ONCE):
            part = slice(start, start + TOKENS_AT_ONCE)
            np.take(table_bits, codes[part], out=values_bits[part], mode="clip")
            values[part] *= factors[part]
        return values


def _as_tensor(held: Tensor, dtype: torch.dtype) -> torch.Tensor:
    raw = held.data if held.data.ctypes.data % dtype.itemsize == 0 else held.data.copy()
    return torch.from_numpy(raw).view(dtype).reshape(held.shape)


def _read_index(store: Path) -> dict[int, Expected]:
    import pyarrow.parquet as pq

    path = store / index.FILE
    record = artifact.read_manifest(store).files.get(index.FILE)
    if record is None or (checksum := artifact.checksum(path)) != record.checksum:
        wanted = record.checksum if record else "one in the manifest"
        raise Damaged(f"{path}: checksum {checksum if record else 'unknown'} instead of {wanted}; {repair(store)}")
    columns = ["row", "size", "checksum", "tokens", "key"]
    table = pq.read_table(path, columns=columns).to_pydict()
    rows = zip(*(table[name] for name in columns), strict=True)
    return {row: Expected(size, checksum, tokens, key) for row, size, checksum, tokens, key in rows}
