"""Publishes a folder once with each token, HF_HUB_OFFLINE unset: python publish_driver.py FOLDER REPO TOKEN...

The token `away` goes where no hub is.  Prints one JSON object: what became of each (an address, or class
and sentence of the error).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from slipstream import publish
from slipstream.errors import SlipstreamError

if __name__ == "__main__":
    folder, repository, *tokens = sys.argv[1:]
    found = {}
    for token in tokens:
        os.environ["HF_TOKEN"] = token
        if token == "away":
            os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nobody listens
        try:
            found[token] = publish.push(publish.Prepared(Path(folder), repository), private=True)
        except SlipstreamError as error:
            found[token] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))
