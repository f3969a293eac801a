"""A drafter on the Hugging Face Hub: what would be uploaded, and the upload.

The token comes from HF_TOKEN and the Hub's address from HF_ENDPOINT, as huggingface_hub has them; neither is ever
printed.  What goes up is an export made for it: config, weights and card, which names the repository in its commands
and no folder of this machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from slipstream.config import Dtype
from slipstream.drafter import card, engines, export, opened, source
from slipstream.errors import InputError, ServerError, TransientError, is_transient_status

REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
TOKEN = re.compile(r"[!-~]+")
REASONS = {
    401: "it does not know the token in HF_TOKEN; make one with write access",
    403: "the token in HF_TOKEN may not write there; give it write access to this repository",
    404: "no such repository, or the token in HF_TOKEN may not see it",
}


@dataclass(frozen=True)
class Prepared:
    """A folder that is ready to be uploaded to `repository`."""

    folder: Path
    repository: str
    base_model: str = ""

    @property
    def files(self) -> list[tuple[str, int]]:
        """Name and size in bytes of each file."""
        return [(path.name, path.stat().st_size) for path in sorted(self.folder.iterdir())]

    @property
    def text(self) -> str:
        """The model card."""
        return (self.folder / export.CARD).read_text(encoding="utf-8")


@contextmanager
def prepared(
    found: source.Source,
    repository: str,
    scratch: Path,
    form: engines.Form = "flat",
    dtype: Dtype | None = None,
    embeddings: bool = True,
    verifier: str | None = None,
    layer_ids: list[int] | None = None,
) -> Iterator[Prepared]:
    """What would be uploaded, in a folder below `scratch` that is gone when the block ends.

    A verifier that is known by its folder here is called by that folder's name, unless `verifier` says another.
    Raises InputError for a repository that is no `org/name`, and what `opened.read` and `export.write` raise.
    """
    if not REPOSITORY.fullmatch(repository):
        raise InputError(f"--repo {repository}: expected org/name, as the Hub calls a repository")
    drafter = opened.read(found.folder, layer_ids)
    named = (drafter.config.get("speculators_config") or {}).get("verifier") or {}
    known = verifier or named.get("name_or_path")
    if verifier:
        drafter = source.for_verifier(drafter, verifier)
    if known:
        drafter = source.called(
            drafter, Path(known).name if Path(known).exists() or Path(known).is_absolute() else known
        )
    dtype = dtype or source.dtype_of(found, drafter)
    scratch.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=scratch) as folder:
        target = Path(folder) / "drafter"
        export.write(export.cast(drafter, dtype), target, form, dtype, embeddings, facts=found.facts, name=repository)
        yield Prepared(target, repository, card.verifier_name(drafter, found.facts))


def push(ready: Prepared, private: bool = False) -> str:
    """Uploads and returns the address of the commit; repeated after a failure it goes on.

    Raises InputError without a token, and when the Hub refuses it; TransientError when the Hub is away or overloaded;
    ServerError for any other answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    token = os.environ.get("HF_TOKEN", "").strip()
    if not token:
        raise InputError("HF_TOKEN: not set, and the Hub takes no upload without a token with write access")
    if not TOKEN.fullmatch(token):  # as a header it would be refused with the whole of it in the message
        raise InputError("HF_TOKEN: holds a blank or a character that no token has; set it to the token alone")
    away: Any = (*HfHubHTTPError.__bases__, ValueError)  # OSError and the HTTP client's own, which is none
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    try:
        api.create_repo(ready.repository, private=private or None, exist_ok=True)
        done = api.upload_folder(
            repo_id=ready.repository, folder_path=ready.folder, commit_message="EAGLE-3 drafter, exported by Slipstream"
        )
    except OfflineModeIsEnabled as error:
        raise InputError("HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set: unset both to upload") from error
    except HFValidationError as error:
        raise InputError(f"--repo {ready.repository}: {' '.join(str(error).split())}") from error
    except HfHubHTTPError as error:
        raise _refused(ready.repository, error) from error
    except away as error:
        raise TransientError(
            f"{ready.repository}: the upload broke off ({error}); run the same command again"
        ) from error
    return str(done.commit_url)


def _refused(repository: str, error: Any) -> Exception:
    status = error.response.status_code if error.response is not None else 0
    if status in REASONS:
        return InputError(f"{repository}: the Hub answers {status}: {REASONS[status]}")
    kind = TransientError if is_transient_status(status) else ServerError
    said = " ".join((error.server_message or "without a reason").split())[:300]
    return kind(f"{repository}: the Hub answers {status}: {said}")
