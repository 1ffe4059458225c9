"""Text to token ids and back: the rules for encoding a prompt, incremental decoding."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from widemesh.model import tokenizer_files
from widemesh.model.config import ConfigError
from widemesh.model.tokenizer_files import load_tokenizer_config
from widemesh.serving.request import RequestError

BROKEN = "\ufffd"  # what a decoder writes for bytes that are no whole character


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder, once `encode_prompt` can use it. Raises ConfigError with the path."""
    tokenizer = tokenizer_files.load_tokenizer(folder)
    bos_to_prepend(tokenizer, load_tokenizer_config(folder))
    return tokenizer


def bos_to_prepend(tokenizer: Tokenizer, tokenizer_config: dict[str, Any]) -> int | None:
    """Id that must open every prompt, or None unless `add_bos_token` is true. Raises ConfigError if it has no id."""
    if tokenizer_config.get("add_bos_token") is not True:
        return None
    bos = tokenizer_config.get("bos_token")
    if isinstance(bos, dict):  # written as an added token
        bos = bos.get("content")
    token_id = tokenizer.token_to_id(bos) if isinstance(bos, str) else None
    if token_id is None:
        raise ConfigError(
            f"bos_token={bos!r} of tokenizer_config.json is not in tokenizer.json; correct it or add_bos_token"
        )
    return token_id


def encode_prompt(tokenizer: Tokenizer, text: str, tokenizer_config: dict[str, Any]) -> Int32[np.ndarray, " S"]:
    """Token ids of a prompt, the tokenizer's own special tokens included.

    BOS is prepended only if `add_bos_token` is true and the ids do not begin with it already. No chat template is
    applied. Raises RequestError if the text is not valid Unicode.
    """
    try:
        ids = tokenizer.encode(text, add_special_tokens=True).ids
    except (TypeError, UnicodeError):
        raise RequestError("prompt", text[:40], "must be text without lone surrogates") from None
    bos = bos_to_prepend(tokenizer, tokenizer_config)
    if bos is not None and (not ids or ids[0] != bos):
        ids = [bos, *ids]
    return np.asarray(ids, np.int32)


class Detokenizer:
    """Turns the token ids of one request into text as they come, never showing a part of a character.

    Text is held back while its last bytes are no whole character. Bytes that can never become one, in the middle of
    a text, decode to U+FFFD; at the very end `flush` drops them.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._shown = ""

    def feed(self, token_ids: Iterable[int]) -> str:
        """Text that these ids complete; empty while a character is unfinished."""
        ids = [int(i) for i in token_ids]
        self._ids.extend(ids)
        text = "".join(self._stream.step(self._tokenizer, i) or "" for i in ids)
        self._shown += text
        return text

    def flush(self) -> str:
        """Text held back so far, without an unfinished last character. Call once, after the last id."""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special_tokens)
        if not whole.startswith(self._shown):  # a decoder that rewrites earlier text; what was shown stands
            return ""
        return whole[len(self._shown) :].rstrip(BROKEN)
