"""The one key function: every tier and index names things with it.

A key is SHA-256 over tagged, length-framed fields, so that neither types nor neighbouring
fields can be confused ("a", "bc" is not "ab", "c"), and is the same in every process.
"""

from __future__ import annotations

import hashlib

import numpy as np

LAYOUT = "kv-per-layer/1"  # [kv_heads, tokens, head_dim] a layer, keys rotated at `position`
Field = str | int | float | bytes | None


def _frame(value: Field) -> bytes:
    match value:
        case None:
            tag, body = b"n", b""
        case bytes():
            tag, body = b"b", value
        case str():
            tag, body = b"s", value.encode()
        case bool() | int():
            tag, body = b"i", str(int(value)).encode()
        case float():
            tag, body = b"f", value.hex().encode()
        case _:
            raise TypeError(f"cannot key a {type(value).__name__}")
    return tag + len(body).to_bytes(8, "big") + body


def digest(kind: str, **fields: Field) -> str:
    """Hex SHA-256 of ``kind`` and the named fields, independent of their order."""
    sha = hashlib.sha256(_frame(kind))
    for name in sorted(fields):
        sha.update(_frame(name))
        sha.update(_frame(fields[name]))
    return sha.hexdigest()


def token_bytes(ids: np.ndarray) -> bytes:
    """Token ids as little-endian int64."""
    return np.ascontiguousarray(ids, dtype="<i8").tobytes()


def content_key(namespace: str, text: str, inner_ids: np.ndarray) -> str:
    """Key of a chunk's content: its text and the token ids that do not touch its edges."""
    return digest("content", namespace=namespace, text=text, ids=token_bytes(inner_ids))


def chain_key(namespace: str, ids: np.ndarray) -> str:
    """Key of a whole token prefix ``ids`` (int64 ``[tokens]``)."""
    return digest("chain", namespace=namespace, ids=token_bytes(ids))


def chain_root(namespace: str) -> bytes:
    """The key that the first page of every prompt in ``namespace`` continues: 32 bytes."""
    return hashlib.sha256(_frame("pages") + _frame(namespace)).digest()


def page_key(parent: bytes, content: bytes) -> bytes:
    """Key of a page: 32 bytes over the key of the page ahead of it (of fixed length, so that the
    two cannot run into each other) and its own token ids, int64."""
    return hashlib.sha256(parent + content).digest()


def entry_id(key: str) -> int:
    """Stable positive 64-bit id of a content key, for FAISS."""
    return int(key[:16], 16) >> 1
