"""Which failures may be tried again."""

from __future__ import annotations

import pytest

from slipstream import errors


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 599])
def test_transient_statuses(status: int) -> None:
    assert errors.is_transient_status(status)


@pytest.mark.parametrize("status", [200, 301, 400, 401, 403, 404, 413, 422])
def test_permanent_statuses(status: int) -> None:
    assert not errors.is_transient_status(status)


def test_only_the_transient_error_is_transient() -> None:
    every = (errors.InputError, errors.StageFailed, errors.Damaged, errors.ServerError, errors.TransientError)
    assert [kind.__name__ for kind in every if kind("x").transient] == ["TransientError"]
