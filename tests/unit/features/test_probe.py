"""Planted faults in real pocket states: each is found and named, and passes once its check is taken away.

The verifier's states and log-probabilities are transformers'; the stub answers with them as vLLM would.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pocket_states import States, of_equal_length, pocket, retrained, samples, serve
from safetensors.numpy import save
from safetensors.torch import load_file, save_file
from stub_server import Capture, StubServer

from slipstream.config import RunConfig
from slipstream.digest import digest_tokens
from slipstream.errors import ServerError, StageFailed, TransientError
from slipstream.features import diagnosis, probe, recapture, reference, vouched
from slipstream.features.distance import relative
from slipstream.features.lease import Lease
from slipstream.features.pool import FeaturePool
from slipstream.features.recipe import POST_NORM, PRE_NORM
from slipstream.features.rows import Row
from slipstream.features.sample import Form
from slipstream.features.tolerance import TOLERANCES
from slipstream.serving import Endpoint

IDS = [2, 3, 5, 6]
A, B = of_equal_length()


@dataclass
class Shard:
    """A pool with stored samples, and a stub as the server that made them."""

    pool: FeaturePool
    stub: StubServer
    make: Callable[..., RunConfig]
    folder: Path

    @property
    def lease(self) -> Lease:
        return Lease(Endpoint(self.stub.url, "stub"), self.stub.storage)

    def store(self, tokens: Sequence[int], states: np.ndarray) -> None:
        """Puts states into the pool as the tokens' own, whatever they are."""
        captured = self.folder / "captured.safetensors"
        captured.write_bytes(save({"hidden_states": states, "token_ids": np.asarray(tokens, dtype=np.int64)}))
        self.pool.add(tokens, captured)

    def rows(self, *sequences: Sequence[int]) -> list[Row]:
        return [Row(i, f"t{i}", "train", 1, list(tokens)) for i, tokens in enumerate(sequences)]

    def config(self, **features: Any) -> RunConfig:
        return self.make(features={"probe_samples": 2} | features)

    def __call__(self, *sequences: Sequence[int], final_state: str = PRE_NORM, **more: Any) -> probe.Table:
        """Probes these sequences."""
        layers, captured = more.pop("layers", None), more.pop("captured", ())
        rows, config = self.rows(*sequences), self.config(**more)
        return probe.probe(config, self.pool, rows, self.lease, layers, self.folder, final_state, captured)

    def finding(self, *sequences: Sequence[int], **more: Any) -> str:
        """What the probe says of them."""
        with pytest.raises(StageFailed) as raised:
            self(*sequences, **more)
        return str(raised.value)

    def layers(self, of: States | None = None, ids: Sequence[int] = range(1, 7)) -> Any:
        """The layer reference that a server with these layers gives."""
        with StubServer() as server:
            serve(server, ids, of or pocket())
            lease = Lease(Endpoint(server.url, "stub"), server.storage)
            return reference.run(self.folder / "work", self.config(), lambda: _entered(lease))


class _entered:
    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    def __enter__(self) -> Lease:
        return self.lease

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def shard(tmp_path: Path, stub: StubServer, make_config: Callable[..., RunConfig]) -> Iterator[Shard]:
    """An empty pool, and a server that serves the pocket verifier's layers 2, 3, 5 and 6."""
    serve(stub, IDS, pocket())
    with closing(FeaturePool(tmp_path, "r", Form(4, 128, "float32"))) as pool:
        yield Shard(pool, stub, make_config, tmp_path)


def intact(tokens: Sequence[int]) -> np.ndarray:
    return pocket().states(tokens, IDS)


def test_an_intact_store_passes_and_says_how_well(shard: Shard) -> None:
    for tokens in samples()[:5]:
        shard.store(tokens, intact(tokens))
    table = shard(*samples()[:5], layers=shard.layers())
    written = json.loads((shard.folder / probe.FILE).read_text())
    assert table.finding is None
    assert written["not_probed"] == []
    summary = written["summary"]
    assert (summary["samples"], summary["layer_ids"], summary["argmax"]) == (2, IDS, 1.0)
    assert summary["relative_error"] < 1e-5
    assert summary["mean_difference"] < 1e-4
    keys = sorted(digest_tokens(tokens) for tokens in samples()[:5])
    assert [sample["key"] for sample in written["samples"]] == keys[:2]


def test_what_a_probe_has_vouched_for_is_not_probed_again(shard: Shard) -> None:
    for tokens in samples()[:3]:
        shard.store(tokens, intact(tokens))
    shard(*samples()[:3])
    asked = len(shard.stub.requests)
    assert shard(*samples()[:3]).samples == []
    assert len(shard.stub.requests) == asked
    vouched.forget(shard.pool.folder, [digest_tokens(samples()[1])])  # it is captured again
    assert [sample["trace"] for sample in shard(*samples()[:3]).samples] == ["t1"]


def test_what_was_there_before_is_probed_beside_what_came_now(shard: Shard) -> None:
    """Both halves of a shard came their own way, so neither vouches for the other."""
    for tokens in samples()[:6]:
        shard.store(tokens, intact(tokens))
    keys = sorted(digest_tokens(tokens) for tokens in samples()[:6])
    table = shard(*samples()[:6], captured=keys[:3])
    assert [sample["key"] for sample in table.samples] == [*keys[3:5], *keys[:2]]


def test_what_failed_is_probed_first_among_others(shard: Shard) -> None:
    """Another division of the rows puts the bad sample, the last by key, among many that nobody probed either."""
    in_order = sorted(samples()[:6], key=digest_tokens)
    bad = in_order[-1]
    shard.store(bad, pocket().states(bad, [2, 3, 5, 5]))
    shard.finding(bad)
    for tokens in in_order[:-1]:
        shard.store(tokens, intact(tokens))
    assert "trace t5: the stored" in shard.finding(*in_order, probe_samples=1)
    vouched.forget(shard.pool.folder, [digest_tokens(bad)])  # it is captured again
    shard.store(bad, intact(bad))
    assert [sample["key"] for sample in shard(*in_order, probe_samples=1).samples] == [digest_tokens(in_order[0])]


def test_a_probe_that_failed_fails_again(shard: Shard) -> None:
    shard.store(A, pocket().states(A, [2, 3, 5, 5]))
    first = shard.finding(A)
    assert shard.finding(A) == first
    assert shard.pool.path(digest_tokens(A)).exists()
    assert digest_tokens(A) in first


Plant = Callable[[Shard], dict[str, Any]]


def ids_off_by_one(shard: Shard) -> dict[str, Any]:
    shard.store(A, pocket().states(A, [1, 2, 4, 5]))
    return {}


def last_id_of_the_older_convention(shard: Shard) -> dict[str, Any]:
    shard.store(A, pocket().states(A, [2, 3, 5, 5]))
    return {}


def normed_in_the_store(shard: Shard) -> dict[str, Any]:
    states = intact(A).copy()
    states[:, -1] = pocket().normed(states[:, -1])
    shard.store(A, states)
    return {}


def _normed_last(states: np.ndarray) -> np.ndarray:
    changed = states.copy()
    changed[:, -1] = pocket().normed(changed[:, -1])
    return changed


def normed_by_the_server(shard: Shard) -> dict[str, Any]:
    serve(shard.stub, IDS, pocket(), _normed_last)
    shard.store(A, _normed_last(intact(A)))
    return {}


def said_to_be_normed(shard: Shard) -> dict[str, Any]:
    shard.store(A, intact(A))
    return {"final_state": POST_NORM}


def server_without_its_norm(shard: Shard) -> dict[str, Any]:
    """Log-probabilities of a verifier that lost its final norm."""
    head = pocket().model.lm_head.weight.detach()

    def rows(tokens: list[int]) -> list[dict[int, float] | None]:
        logits = torch.log_softmax(torch.from_numpy(pocket().states(tokens, [6])[:, 0]) @ head.T, -1)
        return [None, *({int(t): float(row[t]) for t in row.topk(5).indices} for row in logits[:-1])]

    serve(shard.stub, IDS, pocket(), prompt_logprobs=rows(A))
    shard.store(A, intact(A))
    return {}


def swapped(shard: Shard) -> dict[str, Any]:
    shard.store(A, intact(B))
    shard.store(B, intact(A))
    return {"sequences": (A, B)}


def another_requests(shard: Shard) -> dict[str, Any]:
    shard.store(A, intact(B))
    return {}


def other_weights_in_the_store(shard: Shard) -> dict[str, Any]:
    shard.store(A, retrained().states(A, IDS))
    return {}


def other_head_on_the_server(shard: Shard) -> dict[str, Any]:
    """The states are the server's, but its weights are not the folder's."""
    serve(shard.stub, IDS, pocket(), prompt_logprobs=retrained().logprobs(A))
    shard.store(A, intact(A))
    return {}


def last_id_of_the_server(shard: Shard) -> dict[str, Any]:
    serve(shard.stub, [2, 3, 5, 5], pocket())
    shard.store(A, pocket().states(A, [2, 3, 5, 5]))
    return {}


def part_of_the_sample(shard: Shard) -> dict[str, Any]:
    states = intact(A).copy()
    states[-7:] = intact(B)[-7:]
    shard.store(A, states)
    return {}


PLANTED = [
    (ids_off_by_one, "layer position 1 holds id 2 (the input of layer 2), not 3", "its layer ids are 1 too high"),
    (last_id_of_the_older_convention, "layer position 3 holds id 5 (the input of the last layer)", "final state"),
    (normed_in_the_store, "the stored final state has passed the final norm already", "twice"),
    (normed_by_the_server, "the final state has passed the final norm already", "twice"),
    (said_to_be_normed, "the stored final state lacks the final norm", "missing"),
    (server_without_its_norm, "the server answers without the verifier's final norm", "missing"),
    (swapped, "those of another request: this sample's own lie in", ".safetensors"),
    (another_requests, "those of another request: they follow other tokens", "relative error"),
    (other_weights_in_the_store, "those of other weights", "the verifier has changed"),
    (other_head_on_the_server, "with the final norm or without", "other weights than the verifier's folder"),
    (last_id_of_the_server, "with the final norm or without", "not the state after the last layer"),
    (part_of_the_sample, f"differ at 7 of {len(A)} tokens, the first is token {len(A) - 7}", "part of the sample"),
]


@pytest.mark.parametrize(("plant", "named", "more"), PLANTED, ids=[plant.__name__ for plant, *_ in PLANTED])
def test_a_planted_fault_is_named(shard: Shard, plant: Plant, named: str, more: str) -> None:
    given = plant(shard)
    said = shard.finding(*given.pop("sequences", (A,)), **given)
    assert named in said
    assert more in said
    assert json.loads((shard.folder / probe.FILE).read_text())["finding"] in said


@pytest.mark.parametrize("plant", [plant for plant, *_ in PLANTED], ids=[plant.__name__ for plant, *_ in PLANTED])
def test_without_its_check_it_passes(shard: Shard, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    given = plant(shard)
    stored = plant not in (
        normed_by_the_server,
        server_without_its_norm,
        other_head_on_the_server,
        last_id_of_the_server,
    )
    if stored:  # also without comparing with a second capture, the final state gives some of them away
        monkeypatch.setattr(diagnosis, "store_fault", lambda *_: None)
    monkeypatch.setattr(diagnosis, "final_fault", lambda *_: None)
    assert shard(*given.pop("sequences", (A,)), **given).finding is None


LAYERS: list[tuple[Any, str]] = [
    ({"ids": [2, 4, 5, 6]}, "the server's layer position 1 holds id 4 (the input of layer 4), not 3"),
    (
        {"ids": [1, 2, 4, 5]},
        "position 0 holds id 1 (the input of layer 1), not 2 (the input of layer 2), and so do 4 of 4",
    ),
    ({"ids": [2, 3, 5, 5]}, "layer position 3 holds id 5 (the input of the last layer), not 6 (the final state)"),
    ({"ids": [0, 3, 5, 6]}, "layer position 0 holds id 0 (the embedding), not 2"),
    ({"ids": IDS, "change": _normed_last}, "the server's final state has passed the final norm already"),
    ({"ids": IDS, "of": "retrained"}, "the server gives other states than the reference"),
]


@pytest.mark.parametrize(("server", "named"), LAYERS)
@pytest.mark.parametrize("checked", [True, False])
def test_a_server_with_other_layers_than_the_reference_is_named(
    shard: Shard, server: dict[str, Any], named: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is what this server gives, so that nothing but the reference tells."""
    layers = shard.layers()
    of = retrained() if server.get("of") else pocket()
    change = server.get("change", lambda states: states)
    serve(shard.stub, server["ids"], of, change)
    shard.store(A, change(of.states(A, server["ids"])))
    if checked:
        assert named in shard.finding(A, layers=layers)
        return
    monkeypatch.setattr(reference, "check", lambda *_: None)
    monkeypatch.setattr(diagnosis, "final_fault", lambda *_: None)
    assert shard(A, layers=layers).finding is None


def test_a_reference_that_is_no_number_is_said_in_a_sentence(shard: Shard) -> None:
    """Weights of zero or a broken kernel: the capture's own checks, not a stack trace."""
    wrong = pocket().states(reference.sequences(shard.config().verifier)[0], range(1, 7))
    wrong[3, 2, 5] = np.nan
    with StubServer() as server:
        server.on_capture(lambda tokens, number: Capture(states=wrong[: len(tokens)]))
        lease = Lease(Endpoint(server.url, "stub"), server.storage)
        with pytest.raises(StageFailed, match="captured at 6 ids: NaN or infinity at token 3, layer position 2"):
            reference.run(shard.folder / "work", shard.config(), lambda: _entered(lease))


def test_a_reference_of_other_weights_is_named(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    shard.store(A, intact(A))
    said = shard.finding(A, layers=shard.layers(retrained()))
    assert "at every layer" in said
    assert "one of the two has other weights" in said


def test_a_verifier_that_changed_since_the_reference_is_named(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = shard.layers()
    shard.store(A, intact(A))
    recorded = layers.manifest().recipe["verifier"]
    monkeypatch.setattr(reference.verifier, "identity", lambda config: "another")
    said = shard.finding(A, layers=layers)
    assert recorded in said
    assert "is now another" in said


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([0, 1, 2, 3, 4, 5], "id 1 holds the embedding, which is id 0"),
        ([2, 3, 4, 5, 6, 6], "ids 5 and 6 hold the same state"),
        ([1, 2, 3, 4, 5, 4], "not the state after the last layer"),
    ],
)
@pytest.mark.parametrize("checked", [True, False])
def test_a_reference_whose_ids_mean_something_else_is_refused(
    shard: Shard, ids: list[int], said: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not checked:
        monkeypatch.setattr(reference, "_fault", lambda *_: None)
        assert shard.layers(ids=ids).verify() == []
        return
    with pytest.raises(StageFailed, match=said):
        shard.layers(ids=ids)


def test_the_reference_holds_every_layer_and_is_made_once(shard: Shard) -> None:
    layers = shard.layers()
    tokens = reference.sequences(shard.config().verifier)
    held = load_file(layers.folder / "sequence_1.safetensors")
    assert held["token_ids"].tolist() == tokens[1]
    assert np.array_equal(held["hidden_states"].numpy(), pocket().states(tokens[1], range(1, 7)))
    assert layers.manifest().counts["layers"] == 6
    with StubServer() as unused:
        lease = Lease(Endpoint(unused.url, "stub"), unused.storage)
        again = reference.run(shard.folder / "work", shard.config(layer_ids=[1, 4]), lambda: _entered(lease))
        assert again == layers
        assert unused.requests == []


def test_the_references_tokens_are_plain_and_the_same_everywhere(shard: Shard) -> None:
    first, second, third = reference.sequences(shard.config().verifier)
    assert (len(first), len(second), len(third)) == (48, 43, 38)
    assert max(map(max, (first, second, third))) < 490  # the pocket verifier's control tokens begin there
    assert len(set(first)) > 24
    assert first[:3] == reference.sequences(shard.config().verifier)[0][:3]


def test_a_head_that_cannot_be_unpacked_is_not_probed_and_says_so(shard: Shard, tmp_path: Path) -> None:
    """Packed, and what would unpack it is missing (`verifier_ends` reads those that are whole)."""
    folder = tmp_path / "verifier"
    folder.mkdir()
    source = Path(shard.config().verifier.path)
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name != "model.safetensors.index.json":
            (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(source / "model-00001-of-00001.safetensors")
    weights["language_model.lm_head.weight_packed"] = weights.pop("language_model.lm_head.weight").view(torch.int32)
    save_file(weights, folder / "model.safetensors")
    shard.store(A, intact(A))
    make = shard.make
    shard.make = lambda **changes: make(**changes, verifier={"path": str(folder)})
    table = shard(A)
    assert table.samples[0]["final"] is None
    said = "lm_head is packed (language_model.lm_head.weight_packed) and has no weight_shape"
    assert any(said in reason for reason in table.not_probed)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"refuses_logprobs": True}, "the server refuses prompt_logprobs: HTTP 400"),
        ({"prompt_logprobs": None}, "the server answers without prompt_logprobs"),
    ],
)
def test_a_server_without_log_probabilities_is_not_probed_and_says_so(
    shard: Shard, answer: dict[str, Any], reason: str
) -> None:
    serve(shard.stub, IDS, pocket(), **answer)
    shard.store(A, intact(A))
    table = shard(A)
    assert table.samples[0]["final"] is None
    assert table.samples[0]["relative_errors"] == [0, 0, 0, 0]
    assert any(reason in entry for entry in table.not_probed)
    assert json.loads((shard.folder / probe.FILE).read_text())["not_probed"] == table.not_probed


def test_nothing_is_vouched_for_while_probing_is_off(shard: Shard) -> None:
    shard.store(A, intact(A))
    assert shard(A, probe_samples=0).not_probed[0] == "features.probe_samples is 0"
    assert len(shard(A).samples) == 1


def test_a_long_sample_is_asked_for_log_probabilities_of_its_beginning(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recapture, "LOGPROB_TOKENS", 30)
    shard.store(A, intact(A))
    table = shard(A)
    asked = shard.stub.asked("/v1/completions")
    assert [(len(body["prompt"]), body.get("prompt_logprobs")) for body in asked] == [(30, 5), (len(A), None)]
    assert (table.samples[0]["tokens"], table.samples[0]["final"]["positions"]) == (len(A), 29)
    assert list(shard.stub.storage.iterdir()) == []


def test_one_huge_token_does_not_hide_the_others() -> None:
    """A first token as large models have it, 1,000 times the others and the same everywhere, before other states."""
    generator = np.random.default_rng(0)
    ours, theirs = (torch.from_numpy(generator.normal(size=(200, 64))) for _ in range(2))
    ours[0] = theirs[0] = 1000.0
    assert float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)) < TOLERANCES["bfloat16"].states
    by_token = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    assert relative(ours, theirs) == pytest.approx(np.sqrt(np.mean(by_token**2)))
    assert relative(ours, theirs) > 1
    assert relative(ours * 1.02, ours) == pytest.approx(0.02)


@pytest.mark.parametrize("status", [500, 401])
def test_a_server_that_fails_is_no_finding(shard: Shard, status: int) -> None:
    serve(shard.stub, IDS, pocket(), status=status)
    shard.store(A, intact(A))
    with pytest.raises(TransientError if status == 500 else ServerError):
        shard(A)
    assert vouched.unprobed(shard.pool.folder, [digest_tokens(A)]) == {digest_tokens(A)}
