"""What the survey says about a store as a whole, before its states are read and before a server starts."""

from __future__ import annotations

from slipstream import verifier
from slipstream.config import RunConfig
from slipstream.errors import InputError, StageFailed
from slipstream.features.recipe import store_dtype
from slipstream.imports.found import Store
from slipstream.imports.survey import HARMLESS, Survey


def judge_statement(store: Store, config: RunConfig) -> None:
    """Raises InputError when the store says that it was made with another verifier or at another hidden size."""
    said, shape = store.stated, verifier.load_shape(config.verifier)
    if said.hidden_size not in (None, shape.hidden_size):
        raise InputError(
            f"{said.where}: a store of hidden size {said.hidden_size}, the verifier {config.verifier.path} has "
            f"{shape.hidden_size}"
        )
    if said.identity is not None and said.identity != (here := verifier.identity(config.verifier)):
        raise InputError(
            f"{said.where}: made with the verifier of digest {said.identity}, {config.verifier.path} has {here}: the "
            "states of one verifier do not train a drafter for another"
        )


def judge(store: Store, survey: Survey, config: RunConfig, layers: int | None) -> None:
    """Raises InputError for what is wrong with all of it, sets single deviating samples aside.

    `layers` is how many states a token has, when that is stated.  StageFailed when more is lost than
    `features.max_lost_share`.
    """
    shape, where = verifier.load_shape(config.verifier), store.folder
    if not survey.count():
        refuse_losses(store, survey, config)
    name, top = survey.highest_token()
    if top >= shape.vocab_size:
        raise InputError(
            f"{where / name}: holds token id {top} and the verifier has {shape.vocab_size} tokens (0 to "
            f"{shape.vocab_size - 1}): a store of another tokenizer"
        )
    wanted = {"hidden": shape.hidden_size, "dtype": store_dtype(config), "layers": layers}
    advice = {
        "hidden": f"the verifier {config.verifier.path} has {shape.hidden_size}: a store of another verifier",
        "dtype": f"verifier.dtype and features.store want {wanted['dtype']}: set them to what the store holds",
        "layers": f"its layer ids name {layers}: say with --layer-ids what each of them is",
    }
    for column, expected in wanted.items():
        values = survey.values(column)
        value = values[0][0] if expected is None else expected
        others = [found for found in values if found[0] != value]
        count = sum(number for _, number, _ in others)
        if count > config.features.max_lost_share * store.count:
            held, _, name = others[0]
            what = {"hidden": "hidden size", "dtype": "type", "layers": "states a token:"}[column]
            tail = advice[column] if column != "layers" or layers else f"most samples have {value}"
            raise InputError(f"{where / name}: {what} {held}, {tail} ({count} of {store.count} samples)")
        survey.reject_others(column, value)
    if survey.count() and survey.reject_unsupervised() and not survey.count():
        raise InputError(
            f"{where}: the loss mask is empty in every sample, so a drafter would learn nothing from it; make the "
            "store "
            "again with a chat template that marks the assistant's tokens"
        )
    survey.reject_repeated()
    refuse_losses(store, survey, config)


def refuse_losses(store: Store, survey: Survey, config: RunConfig) -> None:
    """Raises StageFailed when nothing is usable or more is lost than `features.max_lost_share`."""
    lost = [(name, reason) for name, reason in survey.rejects() if reason not in HARMLESS]
    if lost and (len(lost) > config.features.max_lost_share * store.count or not survey.count()):
        name, reason = lost[0]
        raise StageFailed(
            f"{store.folder}: {len(lost)} of {store.count} samples cannot be used, more than features.max_lost_share "
            f"{config.features.max_lost_share:g}; the first is {name}: {reason}"
        )
