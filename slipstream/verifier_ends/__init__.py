"""The verifier's two ends outside its layers: embedding rows, and final norm with output head, read from its folder.

Every layout that published checkpoints have: any prefix, sharded or one file, tied or not, quantised or not, with
prediction layers and vision towers beside (`names`, `files`, `matrix`).  Nothing is loaded as a whole: a head of
163,840 x 7,168 is 2.3 GB and is read in blocks of rows.
"""

from slipstream.verifier_ends.files import Unreadable
from slipstream.verifier_ends.head import Head, capped, read_embedding, read_head
from slipstream.verifier_ends.matrix import Matrix

__all__ = ["Head", "Matrix", "Unreadable", "capped", "read_embedding", "read_head"]
