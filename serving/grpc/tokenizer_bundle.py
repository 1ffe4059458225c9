"""The tokenizer files of a checkpoint as one zip: packed and cut up for GetTokenizer, checked and opened again."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2
from tokenizers import Tokenizer

CHUNK_BYTES = 64 * 1024

# What a client needs to encode chats and decode tokens; never weights. Absent ones are left out.
BUNDLED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "*.jinja",
)


class BundleError(ValueError):
    """Tokenizer files that did not arrive whole or cannot be read. The message is one sentence."""


def pack(folder: str | Path) -> bytes:
    """Zip of the tokenizer files in `folder`, flat, the same bytes for the same files. Raises OSError."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for pattern in BUNDLED:
            for path in sorted(Path(folder).glob(pattern)):
                entry = zipfile.ZipInfo(path.name)  # its fixed date keeps the checksum stable
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, path.read_bytes())
    return buffer.getvalue()


def cut(bundle: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """The bundle in order, in chunks; the last carries the SHA-256 of the whole in hexadecimal."""
    for start in range(0, len(bundle), CHUNK_BYTES):
        chunk = common_pb2.GetTokenizerChunk(data=bundle[start : start + CHUNK_BYTES])
        if start + CHUNK_BYTES >= len(bundle):
            chunk.sha256 = hashlib.sha256(bundle).hexdigest()
        yield chunk


def unpack(bundle: bytes, sha256: str) -> Tokenizer:
    """The tokenizer inside a bundle that was put together again. Raises BundleError."""
    if hashlib.sha256(bundle).hexdigest() != sha256:
        raise BundleError("the tokenizer did not arrive whole (its SHA-256 differs); try again")
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
    except Exception as err:  # zipfile, KeyError, UnicodeError, and the tokenizer library's bare Exception
        raise BundleError(f"the server's tokenizer is not usable ({err}); serve a folder with tokenizer.json") from None
    return tokenizer
