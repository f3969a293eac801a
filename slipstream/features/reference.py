"""The layer reference: a few short sequences captured at every layer, once per verifier, by a server of its own.

    feature-reference/<key>/
      sequence_<i>.safetensors   `hidden_states` [tokens, N, hidden] of ids 1 … N, `token_ids`: a sample's format

Its key is the features' recipe without the layer ids.  Every shard's server captures the same sequences with the
shard's ids, and each must be the reference's state of that id and of no other.

That the reference's own ids mean what they say follows from four facts, checked when it is made: ids ascend, all N
states are different, id 1 is not the embedding (which is id 0), and the last one gives the server's log-probabilities
through the final norm and the head.  Id 0 itself is not captured: DeepSeek-type models in vLLM cannot give it; where
the embedding can be read from the verifier's folder it stands as id 0.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from slipstream import atomic, serving, verifier
from slipstream.artifact import Artifact, claim, stage_key
from slipstream.config import RunConfig, VerifierConfig
from slipstream.digest import digest, digest_tokens
from slipstream.errors import StageFailed
from slipstream.features import recipe as recipes
from slipstream.features import servers
from slipstream.features.diagnosis import Layers, Sample, final_fault, misplaced
from slipstream.features.distance import relative
from slipstream.features.lease import Lease
from slipstream.features.recapture import Recapture, recapture
from slipstream.features.sample import BadSample, Form
from slipstream.features.tolerance import TOLERANCES, Tolerance
from slipstream.verifier_ends import Head, Unreadable, read_embedding, read_head

STAGE, VERSION = "feature-reference", 1
SEQUENCES, LONGEST, CONTEXT = 3, 48, 64
FAR = 2.0  # a state of this id must be so many times nearer to its own id's than to any other's

Start = Callable[[], AbstractContextManager[Lease]]


def wanted(config: RunConfig) -> bool:
    """Whether shards compare with a reference.  Servers that the user named have the layers they were started with."""
    features = config.features
    probed = features.probe_all_layers and features.probe_samples > 0 and features.store != "none"
    return probed and not config.servers.features_endpoints and not config.traces.imported  # measured when imported


def _recipe(config: RunConfig) -> dict[str, Any]:
    """Everything of the features' recipe but the captured layers and the form they are kept in."""
    whole = recipes.recipe_of(config, recipes.PRE_NORM)
    made = {name: value for name, value in whole.items() if name not in ("layer_ids", "dtype")}
    return {**made, "sequences": digest([digest_tokens(tokens) for tokens in sequences(config.verifier)])}


def key(config: RunConfig) -> str:
    """The folder key of this verifier's reference."""
    return stage_key(STAGE, VERSION, _recipe(config), {})


def sequences(config: VerifierConfig) -> list[list[int]]:
    """The token ids: spread over the vocabulary by a hash, control tokens left out; the same in every run."""
    shape = verifier.load_shape(config)
    control = set(verifier.special_tokens(verifier.folder_of(config)).values()) | set(shape.eos_token_ids)
    plain = [token for token in range(shape.vocab_size) if token not in control]
    length = min(LONGEST, config.max_model_len - 1)

    def token(number: int, position: int) -> int:
        hashed = hashlib.sha256(f"{number}:{position}".encode()).digest()
        return plain[int.from_bytes(hashed[:8], "little") % len(plain)]

    return [[token(number, position) for position in range(length - 5 * number)] for number in range(SEQUENCES)]


@contextmanager
def serve(workdir: Path, config: RunConfig) -> Iterator[Lease]:
    """An extraction server for all layers, with a short context: states of all layers take much memory a token."""
    shape = verifier.load_shape(config.verifier)
    short = config.verifier.model_copy(update={"max_model_len": min(config.verifier.max_model_len, CONTEXT)})
    storage = servers.storage_folder(workdir, "reference")
    storage.mkdir(parents=True, exist_ok=True)
    spec = serving.extraction_server(range(1, shape.num_layers + 1), storage)
    log, cache = workdir / "logs" / "reference.log", serving.cache_folder(config.servers, workdir)
    try:
        with serving.serve(
            short, config.servers, spec, log, cache, serving.visible_gpus(config.servers, 0)
        ) as endpoint:
            yield Lease(endpoint, storage, endpoint.ended, owned=True)
    finally:
        shutil.rmtree(storage, ignore_errors=True)


def run(workdir: Path, config: RunConfig, start: Start, on_wait: Callable[[str], None] | None = None) -> Artifact:
    """Captures the sequences through the server that `start` gives, and checks what it gave.

    Raises StageFailed when the layer ids or the final state are not what they should be.
    """
    made = _recipe(config)
    with claim(workdir, STAGE, key(config), on_wait) as folder:
        if (done := folder.complete()) is not None:
            return done
        folder.reopen()
        shape = verifier.load_shape(config.verifier)
        tolerance = TOLERANCES[config.verifier.dtype]
        form = Form(shape.num_layers, shape.hidden_size, config.verifier.dtype)
        head, not_probed = _head(config)
        files = []
        with start() as lease:
            for number, tokens in enumerate(sequences(config.verifier)):
                again = _recaptured(config, lease, tokens, form)
                if again.refusal:
                    not_probed.append(again.refusal)
                if fault := _fault(config, tokens, again, head, tolerance):
                    raise StageFailed(
                        f"feature-reference: sequence {number} captured at ids 1 to {form.layers}: {fault}"
                    )
                files.append(_write(folder.path, number, tokens, again.states, config))
        return folder.commit(
            version=VERSION,
            recipe=made,
            inputs={},
            content=digest(made),
            files=files,
            counts={
                "layers": form.layers,
                "sequences": len(files),
                "tokens": sum(map(len, sequences(config.verifier))),
                "not_probed": sorted(set(not_probed)),
            },
        )


def check(config: RunConfig, reference: Artifact, lease: Lease, form: Form, tolerance: Tolerance) -> str | None:
    """What is wrong with the layers of the server in `lease`, None when each is its id's and no other's.

    `form` is that of the shard's samples, `tolerance` the one of their type.
    """
    recorded, now = reference.manifest().recipe["verifier"], verifier.identity(config.verifier)
    if recorded != now:
        return (
            f"the reference {reference.path} recorded verifier {recorded} and {config.verifier.path} is now {now}: the "
            "verifier changed meanwhile"
        )
    shape = verifier.load_shape(config.verifier)
    layers = Layers(verifier.capture_ids(config.features.layer_ids, shape), shape.num_layers)
    known = _load(config, reference)
    held: list[torch.Tensor] = []
    for tokens in sequences(config.verifier):
        held.append(_recaptured(config, lease, tokens, form).states)
    states = torch.cat(held)
    distances = {
        at: {layer_id: relative(states[:, at], expected) for layer_id, expected in known.items()}
        for at in range(len(layers.ids))
    }
    return _judge(config, reference, layers, states, known, distances, tolerance)


def _recaptured(config: RunConfig, lease: Lease, tokens: list[int], form: Form) -> Recapture:
    """`recapture`; raises StageFailed for states that could not have been stored."""
    try:
        return recapture(lease, tokens, form, config.features.request_timeout_s)
    except BadSample as error:
        raise StageFailed(
            f"{lease.endpoint.url}: a sequence of the layer reference, {len(tokens)} tokens, captured at {form.layers} "
            f"ids: {error}; look at the verifier's weights in {config.verifier.path} and at the server's log"
        ) from error


def _judge(
    config: RunConfig,
    reference: Artifact,
    layers: Layers,
    states: torch.Tensor,
    known: dict[int, torch.Tensor],
    distances: dict[int, dict[int, float]],
    tolerance: Tolerance,
) -> str | None:
    if sentence := misplaced(distances, layers, tolerance, "the server's"):
        return sentence
    own = {at: by_id[layers.ids[at]] for at, by_id in distances.items()}
    wrong = [at for at, error in own.items() if not error <= tolerance.states]
    final = len(layers.ids) - 1
    if wrong == [final]:
        head, _ = _head(config)
        if head is not None and relative(states[:, final], head.normed(known[layers.count])) <= tolerance.states:
            return "the server's final state has passed the final norm already, which training would then apply twice"
    if len(wrong) == len(layers.ids):
        return (
            f"the server gives other states than the reference {reference.path} at every layer (relative error "
            f"{own[0]:.2g} at id {layers.ids[0]}): one of the two has other weights than {config.verifier.path}"
        )
    for at in wrong or own:
        nearest = min((i for i in distances[at] if i != layers.ids[at]), key=lambda i: distances[at][i])
        if at in wrong or own[at] * FAR > distances[at][nearest]:
            return (
                f"the server's layer position {at} is not id {layers.name(layers.ids[at])} of the reference: relative "
                f"error {own[at]:.2g}, the next is id {nearest} at {distances[at][nearest]:.2g}"
            )
    return None


def _fault(
    config: RunConfig, tokens: list[int], again: Recapture, head: Head | None, tolerance: Tolerance
) -> str | None:
    """What contradicts the meaning of the ids 1 … N in a capture of all of them."""
    count = again.states.shape[1]
    for at in range(1, count):
        if torch.equal(again.states[:, at], again.states[:, at - 1]):
            return f"ids {at} and {at + 1} hold the same state"
    embedding = _embedding(config, tokens)
    if embedding is not None and relative(again.states[:, 0], embedding) <= tolerance.states:
        return "id 1 holds the embedding, which is id 0: the server's ids are 1 too high"
    if head is None:
        return None
    return final_fault(Sample(tokens, again.states, again.states, again.logprobs), recipes.PRE_NORM, head, tolerance)


def _head(config: RunConfig) -> tuple[Head | None, list[str]]:
    try:
        return read_head(verifier.folder_of(config.verifier)), []
    except Unreadable as reason:
        return None, [f"final state: {reason}"]


def _embedding(config: RunConfig, tokens: list[int]) -> torch.Tensor | None:
    try:
        return read_embedding(verifier.folder_of(config.verifier)).take(tokens)
    except Unreadable:
        return None


def _file(number: int) -> str:
    return f"sequence_{number}.safetensors"


def _write(folder: Path, number: int, tokens: list[int], states: torch.Tensor, config: RunConfig) -> str:
    kept = {"hidden_states": states.to(getattr(torch, config.verifier.dtype)), "token_ids": torch.tensor(tokens)}
    with atomic.replacing(folder / _file(number)) as temporary:
        save_file(kept, temporary)
    return _file(number)


def _load(config: RunConfig, reference: Artifact) -> dict[int, torch.Tensor]:
    """float32 [all tokens, hidden] by layer id; id 0 where the embedding can be read."""
    tensors = [load_file(reference.folder / _file(number)) for number in range(SEQUENCES)]
    states = torch.cat([held["hidden_states"].float() for held in tensors])
    known = {at + 1: states[:, at] for at in range(states.shape[1])}
    embedding = _embedding(config, torch.cat([held["token_ids"] for held in tensors]).tolist())
    return known if embedding is None else {0: embedding, **known}
