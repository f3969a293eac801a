"""The draft vocabulary: which target tokens the drafter may propose, and the two maps between the ids.

`mapping` holds the format and the choice, `kept` the maps of a warm start, `coverage` what either covers of the traces,
`stage` the folder `vocabulary/<key>/`.
"""

from slipstream.vocabulary.mapping import check, choose, load, mappings, ranking
from slipstream.vocabulary.stage import STAGE, VERSION, key, run

__all__ = ["STAGE", "VERSION", "check", "choose", "key", "load", "mappings", "ranking", "run"]
