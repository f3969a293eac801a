"""The final state is told from others by the verifier's own norm, head and text: the pocket verifier's real states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.errors import InputError
from slipstream.imports.final_state import AFTER, BEFORE, look
from slipstream.imports.matched import agreed, match
from slipstream.verifier_ends import Head, read_head
from tests.unit.conftest import POCKET
from tests.unit.imports.conftest import FINAL, WANTED, Made

ALL = list(range(1, FINAL + 1))


@pytest.fixture(scope="module")
def head() -> Head:
    """The pocket verifier's."""
    return read_head(Path(POCKET))


def seen(head: Head, rows: list[Made], layer_ids: list[int], normed: bool = False, dtype: torch.dtype = torch.float32):  # type: ignore[no-untyped-def]
    samples = [
        (r.layers(layer_ids, normed, dtype).float(), torch.tensor(r.ids), torch.tensor(r.mask)) for r in rows[:3]
    ]
    return look(head, samples)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("normed", "where"), [(False, BEFORE), (True, AFTER)])
def test_the_final_state(head: Head, rows: list[Made], normed: bool, where: str, dtype: torch.dtype) -> None:
    found = seen(head, rows, WANTED, normed, dtype)
    assert (found.final_state, found.own_text) == (where, True)
    assert found.tokens > 30


@pytest.mark.parametrize("layer_ids", [[2, 3, 5], [2, 3, 4], [2, 6, 5], [6, 3, 1]])
def test_another_state_is_not_the_final_one(head: Head, rows: list[Made], layer_ids: list[int]) -> None:
    found = seen(head, rows, layer_ids)
    assert (found.final_state, found.own_text) == (BEFORE, False)


def test_text_of_somebody_else_is_not_own(head: Head, rows: list[Made]) -> None:
    other = [
        Made(r.ids[:1] + [(token * 7 + 11) % 400 + 20 for token in r.ids[1:]], r.mask, r.states, r.normed) for r in rows
    ]
    assert not seen(head, other, WANTED).own_text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_position_is_named(head: Head, rows: list[Made], dtype: torch.dtype) -> None:
    reference = rows[0].layers(ALL)
    for layer_ids in ([2, 3, 5, 6], [1, 2, 4, 5], [6, 5, 4]):
        found = match(rows[0].layers(layer_ids, dtype=dtype).float(), reference, ALL, FINAL, head)
        assert [one.layer_id for one in found] == layer_ids
        assert all(one.sure and one.final_state == BEFORE for one in found)
    found = match(rows[0].layers(WANTED, normed=True, dtype=dtype).float(), reference, ALL, FINAL, head)
    assert [(one.layer_id, one.final_state) for one in found] == [(2, BEFORE), (3, BEFORE), (5, BEFORE), (6, AFTER)]


def test_states_of_another_row_match_nothing(head: Head, rows: list[Made]) -> None:
    count = min(len(rows[0].ids), len(rows[1].ids))
    found = match(rows[1].layers(WANTED)[:count], rows[0].layers(ALL)[:count], ALL, FINAL, head)
    with pytest.raises(InputError, match="position 0 is none of the states"):
        agreed("store", [found], ALL)


def test_a_doubled_norm_matches_nothing(head: Head, rows: list[Made]) -> None:
    states = rows[0].layers(WANTED)
    states[:, -1] = head.normed(rows[0].normed)
    with pytest.raises(InputError, match="position 3 is none of the states"):
        agreed("store", [match(states, rows[0].layers(ALL), ALL, FINAL, head)], ALL)


def test_samples_that_disagree(head: Head, rows: list[Made]) -> None:
    columns = [
        match(row.layers(layer_ids), row.layers(ALL), ALL, FINAL, head)
        for row, layer_ids in zip(rows, (WANTED, [2, 4, 5, 6]), strict=False)
    ]
    with pytest.raises(InputError, match="position 1 is none of"):
        agreed("store", columns, ALL)
