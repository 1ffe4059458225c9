"""Tokenizers for the tiny presets: made from their configuration alone, the same on every machine.

From 300 ids on a byte-level BPE, which takes any text; below that a list of words. Both give every id of the
vocabulary a text of its own, the special ids included.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from widemesh.model.config import ConfigError, ModelConfig

MIN_BYTE_VOCAB = 300  # 256 bytes, the special tokens and some merges
IMAGE_TOKEN = "<｜deepseek_image｜>"  # the released name of the image placeholder

# The merges are learned from this. Its words matter little; that they repeat does.
_TEXT = """
The model reads the text from left to right, one token after another, and for each token it writes down what it may
need later. Most of what it writes is small. Some of it is shared between the layers, so that the layers above read
what the layers below have written, and some of it is thrown away when the window has moved on.

A request comes in as text. The text is split into tokens, the tokens are given to the first mesh, and the first mesh
fills the cache. Then the cache is moved to the second mesh, which writes the answer token by token until there is
nothing more to say. When several requests are running at the same time they share the work of each step: the experts
that one of them needs are often the experts that another one needs as well, and reading a weight once is cheaper than
reading it twice.

What should happen when there are more requests than there is room for? They wait. When one request ends, its pages
are given back and the next one starts. Nothing is lost, nothing is written twice, and the answer to a question does
not depend on which other questions were asked with it.

def answer(question, tokens=16):
    for token in range(tokens):
        question = question + next_token(question)
    return question

In the morning the lighthouse keeper counted the ships: one, two, three, ten, twenty. In the evening he counted them
again, and there were 100 more than before. He wrote the number in his book, and under the number he wrote the hour,
the weather and the colour of the sea. "The sea is green," he wrote, "and the wind is from the west."

At noon a boat came in with a broken mast. The men on board had been away for thirty days and had seen nothing but
water, birds and other water. They asked for bread, for rope and for news. The keeper gave them bread and rope; of news
he had none, because nothing ever happened there except the weather. "Then tell us about the weather," said the oldest
man, and so he told them about the weather until it was dark. Later he would remember their faces better than their
names, and their names better than what they had told each other.

Größe über alles: ein Fluß, eine Brücke, ein Café. Où est la mer? Elle est là. 你好，世界。 Привет, мир.
"""


def tiny_tokenizer(config: ModelConfig) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a tiny configuration and the content of its `tokenizer_config.json`.

    Exactly `vocab_size` ids, every one with its own text. Special tokens sit at the ids that the configuration names.
    Raises ConfigError where a vocabulary of words cannot have `engram_compressed_vocab_size` compressed ids.
    """
    specials = _special_tokens(config)
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": specials[config.bos_token_id],
        "eos_token": specials[config.eos_token_ids[0]],
        "pad_token": specials[config.pad_token_id],
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }
    if config.vocab_size >= MIN_BYTE_VOCAB:
        tokenizer = _byte_tokenizer(config.vocab_size, specials)
    else:
        unknown_id = next(i for i in itertools.count() if i not in specials)
        specials[unknown_id] = tokenizer_config["unk_token"] = "<unk>"
        tokenizer = _word_tokenizer(config, specials)
    tokenizer.add_special_tokens([specials[i] for i in sorted(specials)])
    return tokenizer, tokenizer_config


def _special_tokens(config: ModelConfig) -> dict[int, str]:
    """Texts of the ids that stand for no text, by id."""
    specials = {config.bos_token_id: "<bos>", config.pad_token_id: "<pad>"}
    for count, token_id in enumerate(config.eos_token_ids):
        specials[token_id] = f"<eos{count or ''}>"
    if config.image_token_id >= 0:
        specials[config.image_token_id] = IMAGE_TOKEN
    if config.num_nextn_predict_layers > 0:
        specials.setdefault(config.dspark_noise_token_id, "<noise>")
    beyond = {text: token_id for token_id, text in specials.items() if not 0 <= token_id < config.vocab_size}
    if beyond:
        raise ConfigError(f"special token ids {beyond} must lie below vocab_size={config.vocab_size}")
    return specials


def _number(texts: list[str], specials: dict[int, str]) -> dict[str, int]:
    """The vocabulary: special tokens at their ids, `texts` in order over the ids between them."""
    free_ids = (i for i in itertools.count() if i not in specials)
    vocab = {text: token_id for token_id, text in specials.items()}
    vocab.update(zip(texts, free_ids, strict=False))
    return vocab


# --- bytes ----------------------------------------------------------------------------------------------------------


def _byte_tokenizer(vocab_size: int, specials: dict[int, str]) -> Tokenizer:
    """Byte-level BPE over 256 byte symbols and as many merges as fit; reserved tokens where the text gives no more."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    words = Counter(word for word, _ in pre_tokenizer.pre_tokenize_str(_TEXT))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_merges = vocab_size - len(specials) - len(alphabet)
    merges = _learn_merges(words, num_merges)
    texts = alphabet + [left + right for left, right in merges]
    missing = vocab_size - len(specials) - len(texts)
    reserved = [f"<reserved_{i}>" for i in range(missing)]
    vocab = _number(texts + reserved, specials)
    specials.update({vocab[text]: text for text in reserved})

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _learn_merges(words: Counter[str], limit: int) -> list[tuple[str, str]]:
    """Byte-pair merges, the most frequent pair first (ties: the smaller pair), until every word is one symbol."""
    splits = {word: list(word) for word in words}
    merges: list[tuple[str, str]] = []
    texts = {symbol for word in words for symbol in word}
    while len(merges) < limit:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, symbols in splits.items():
            for pair in itertools.pairwise(symbols):
                pairs[pair] += words[word]
        best = min((pair for pair in pairs if "".join(pair) not in texts),
                   key=lambda pair: (-pairs[pair], pair), default=None)
        if best is None:
            break
        merges.append(best)
        texts.add("".join(best))
        splits = {word: _merge(symbols, best) for word, symbols in splits.items()}
    return merges


def _merge(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for symbol in symbols:
        # A symbol that was just merged cannot merge again: it is longer than the pair's left half.
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


# --- words ----------------------------------------------------------------------------------------------------------


def _word_tokenizer(config: ModelConfig, specials: dict[int, str]) -> Tokenizer:
    """A list of words split at white space, anything else is `<unk>`.

    The last `vocab_size - engram_compressed_vocab_size` words are other spellings of the first ones, so that the
    compressed map merges exactly that many ids (none: the map is the identity).
    """
    num_words = config.vocab_size - len(specials)
    num_spellings = config.vocab_size - config.engram_compressed_vocab_size if config.engram_layer_ids else 0
    num_plain = num_words - num_spellings
    if num_spellings < 0 or num_spellings > 3 * num_plain:
        raise ConfigError(f"engram_compressed_vocab_size={config.engram_compressed_vocab_size} cannot be reached with "
                          f"{num_words} words; use a value from {config.vocab_size - num_words * 3 // 4} to "
                          f"{config.vocab_size}")
    words = list(itertools.islice(_words(), num_plain))
    words += itertools.islice((spelling for word in words for spelling in _spellings(word)), num_spellings)
    tokenizer = Tokenizer(models.WordLevel(vocab=_number(words, specials), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _words() -> Iterator[str]:
    """Short pronounceable words, all different: ba, da, ..., then two syllables."""
    syllables = [consonant + vowel for vowel in "aeiou" for consonant in "bdfgklmnprstvz"]
    yield from syllables
    yield from (first + second for first, second in itertools.product(syllables, syllables))


def _spellings(word: str) -> tuple[str, str, str]:
    """Three spellings that fold to `word`: capitalised, in capitals, with an accent (a combining mark)."""
    return word.capitalize(), word.upper(), word + "\u0301"
