"""Checksum of packs."""

import hashlib

from packplan.core.lengths import Lengths, as_lengths
from packplan.core.packs import AnyPacks, as_packs

_FORMAT = b"packplan packs 1\n"


def plan_checksum(packs: AnyPacks, *, lengths: Lengths | None = None) -> str:
    """
    Return the SHA-256 hex digest of *packs*: their samples, in order of packs and inside each.

    The bytes are a format line, then the offsets and indices of `Packs` as little-endian int64, and
    *lengths* if they are given. The digest depends on no machine, process or hash seed.

    Args:
        packs: The packs, or a plan that has them.
        lengths: Tokens of each sample, to tell apart equal packs of other lengths; shape
            (num_samples,).
    """
    packs, digest = as_packs(packs), hashlib.sha256(_FORMAT)
    for array in (packs.offsets, packs.indices, *([] if lengths is None else [as_lengths(lengths, least=0)])):
        digest.update(array.size.to_bytes(8, "little"))
        digest.update(array.astype("<i8", copy=False).data)
    return digest.hexdigest()
