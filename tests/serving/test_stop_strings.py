"""Stop strings are found wherever the tokens cut them, at once, and nothing behind them is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from widemesh.serving.request import SamplingParams
from widemesh.serving.stop_strings import StopText
from widemesh.serving.tokens import load_tokenizer

TEXT = "Gruß an 日本: 🙂 und mehr"


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return load_tokenizer(checkpoint)


@pytest.fixture(scope="module")
def bytes_of(tokenizer: Tokenizer) -> list[int]:
    """TEXT with one token per byte."""
    ((mapped, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(TEXT)
    ids = [tokenizer.token_to_id(char) for char in mapped]
    assert len(ids) == len(TEXT.encode()) and tokenizer.decode(ids) == TEXT
    return ids


def run(tokenizer: Tokenizer, ids: list[int], **settings) -> tuple[StopText, int, str]:
    """One id at a time until it stops: the text object, the ids used, and what was shown on the way."""
    text = StopText(tokenizer, SamplingParams(**settings))
    shown = ""
    for count, token in enumerate(ids, 1):  # noqa: B007
        text.feed([token])
        shown += text.take()
        if text.matched is not None:
            break
    text.flush()
    return text, count, shown + text.take()


def test_every_substring_is_found_with_its_last_byte(tokenizer: Tokenizer, bytes_of: list[int]) -> None:
    for start in range(len(TEXT)):
        for end in range(start + 1, min(start + 8, len(TEXT)) + 1):
            stop = TEXT[start:end]
            at = TEXT.index(stop)
            text, count, shown = run(tokenizer, bytes_of, stop=(stop,))
            assert (text.matched, text.text, shown) == (stop, TEXT[:at], TEXT[:at])
            assert count == len(TEXT[: at + len(stop)].encode())


def test_it_does_not_matter_how_ids_arrive(tokenizer: Tokenizer, bytes_of: list[int]) -> None:
    """Split at every byte into two feeds, or into pieces of any size: same match, same count."""
    stop = "本: 🙂"
    wanted = len(TEXT[: TEXT.index(stop) + len(stop)].encode())
    for split in range(len(bytes_of) + 1):
        text = StopText(tokenizer, SamplingParams(stop=(stop,)))
        used = text.feed(bytes_of[:split])
        if text.matched is None:
            used += text.feed(bytes_of[split:])
        assert (used, text.matched, text.text) == (wanted, stop, "Gruß an 日")


def test_what_is_complete_first_wins(tokenizer: Tokenizer, bytes_of: list[int]) -> None:
    """Also when a merged token completes both: the order of the strings and the tokens' cuts do not matter."""
    merged = tokenizer.encode(TEXT, add_special_tokens=False).ids
    for ids in (bytes_of, merged):
        for stops in (("und mehr", "nd"), ("nd", "und mehr")):
            text, _, shown = run(tokenizer, ids, stop=stops)
            assert (text.matched, shown) == ("nd", TEXT[: TEXT.index("nd")])
        assert run(tokenizer, ids, stop=("d", "und"))[0].matched == "und"


def test_the_string_is_shown_if_wanted(tokenizer: Tokenizer, bytes_of: list[int]) -> None:
    text, _, shown = run(tokenizer, bytes_of, stop=("und",), include_stop_str_in_output=True)
    assert text.text == shown == TEXT[: TEXT.index("und") + 3]


def test_text_is_held_back_only_while_it_may_be_a_stop_string(tokenizer: Tokenizer, bytes_of: list[int]) -> None:
    text = StopText(tokenizer, SamplingParams(stop=("an X",)))
    seen = []
    for token in bytes_of[:10]:
        text.feed([token])
        seen.append(text.take())
    assert seen == ["G", "r", "u", "", "ß", " ", "", "", "", ""]  # the fourth is half of ß
    text.feed(bytes_of[10:])
    text.flush()
    assert text.take() == "an 日本: 🙂 und mehr" and text.matched is None


def test_an_unfinished_beginning_is_shown_at_the_end(tokenizer: Tokenizer, bytes_of: list[int]) -> None:
    text, count, shown = run(tokenizer, bytes_of, stop=("mehr und",))
    assert (text.matched, count, shown, text.text) == (None, len(bytes_of), TEXT, TEXT)


def test_min_tokens_are_not_searched(tokenizer: Tokenizer, bytes_of: list[int]) -> None:
    text, count, _ = run(tokenizer, bytes_of, stop=("n",), min_tokens=8)
    assert text.matched == "n" and text.text == TEXT[: TEXT.index("und") + 1]
    assert count > 8


def test_special_tokens_are_part_of_the_search_only_if_shown(tokenizer: Tokenizer, bytes_of: list[int]) -> None:
    special = tokenizer.id_to_token(1)
    ids = [*bytes_of[:4], 1, *bytes_of[4:]]
    assert run(tokenizer, ids, stop=(special,))[0].matched is None
    assert run(tokenizer, ids, stop=(special,), skip_special_tokens=False)[0].matched == special
