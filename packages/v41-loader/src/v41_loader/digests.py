"""The digests that a manifest states: which algorithms there are, and digests of byte streams."""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import Protocol

import xxhash


class DigestAlgorithm(str, Enum):
    """XXH3 finds accidents at the speed of memory; SHA-256 also finds malice, at a tenth of that or less."""

    XXH3_128 = "xxh3-128"
    SHA256 = "sha256"

    @property
    def hex_digits(self) -> int:
        """Length of a digest as text."""
        return 2 * new_digest(self).digest_size


class Digest(Protocol):
    """A digest under way, as in `hashlib`."""

    @property
    def digest_size(self) -> int: ...

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def new_digest(algorithm: DigestAlgorithm) -> Digest:
    """The digest of no bytes yet."""
    return hashlib.sha256() if algorithm is DigestAlgorithm.SHA256 else xxhash.xxh3_128()


def digest_of(data: bytes, algorithm: DigestAlgorithm) -> str:
    """The digest of a whole small document, in hexadecimal."""
    digest = new_digest(algorithm)
    digest.update(memoryview(data))
    return digest.hexdigest()
