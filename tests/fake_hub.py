"""The Hugging Face Hub's HTTP API as far as an upload needs it, on the loopback interface.

Source of the paths and bodies: huggingface_hub 2.4, hf_api.py, _commit_api.py and lfs.py.  Tokens decide what it
answers: `writes` may write, `reads` gets 403, `strangers` 404, `early` 503, any other 401.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ANSWERS = {"writes": 200, "reads": 403, "strangers": 404, "early": 503}


class FakeHub:
    """A running hub: `repositories` by name, each with the files that were committed."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.created: list[dict[str, Any]] = []
        self.tokens: set[str] = set()
        self._objects: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                """No log."""

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, answer = hub.answer(self.command, self.path.split("?")[0], body, self.headers)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = _serve

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, body: bytes, headers: Any) -> tuple[int, Any]:
        """Status and JSON for one request."""
        if path.startswith("/storage/"):  # a signed address of the storage: no token
            self._objects[path.removeprefix("/storage/")] = body
            return 200, {}
        token = headers.get("Authorization", "").removeprefix("Bearer ")
        self.tokens.add(token)
        if (status := ANSWERS.get(token, 401)) != 200:
            return status, {"error": "as this token has it"}
        return self._allowed(f"{method} {path}", body)

    def _allowed(self, request: str, body: bytes) -> tuple[int, Any]:
        if request == "POST /api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if request == "POST /api/repos/create":
            return self._create(json.loads(body))
        repository = next(name for name in self.repositories if name in request)
        if request == f"POST /api/models/{repository}/preupload/main":
            return 200, {"files": [self._mode(file["path"]) for file in json.loads(body)["files"]]}
        if request == f"POST /{repository}.git/info/lfs/objects/batch":
            return 200, {"transfer": "basic", "objects": [self._place(each) for each in json.loads(body)["objects"]]}
        if request == f"POST /api/models/{repository}/commit/main":
            return self._commit(repository, body)
        return 404, {"error": f"{request} is not one that an upload needs"}

    def _mode(self, path: str) -> dict[str, Any]:
        return {
            "path": path,
            "uploadMode": "lfs" if path.endswith(".safetensors") else "regular",
            "shouldIgnore": False,
        }

    def _create(self, wanted: dict[str, Any]) -> tuple[int, Any]:
        name = f"{wanted['organization']}/{wanted['name']}"
        known = name in self.repositories
        self.created.append(wanted)
        self.repositories.setdefault(name, {})
        return (409 if known else 200), {"url": f"{self.url}/{name}", "name": name}

    def _place(self, each: dict[str, Any]) -> dict[str, Any]:
        return {**each, "actions": {"upload": {"href": f"{self.url}/storage/{each['oid']}"}}}

    def _commit(self, repository: str, body: bytes) -> tuple[int, Any]:
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.repositories[repository][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            if line["key"] == "lfsFile":
                content = self._objects[line["value"]["oid"]]
                assert hashlib.sha256(content).hexdigest() == line["value"]["oid"]
                self.repositories[repository][line["value"]["path"]] = content
        return 200, {"commitUrl": f"{self.url}/{repository}/commit/{'a' * 40}", "commitOid": "a" * 40}
