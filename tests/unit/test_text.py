from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglrollout.errors import ConfigError
from sglrollout.text import StreamText, Tokenizer, check_token_ids
from sglrollout.types import Completion, Message

VOCABULARY = [bytes([byte]) for byte in range(256)] + [
    word.encode() for word in ("he", "llo", " world", "é", "日本", "語", "👩‍🚀", "STOP", "ST", "OP", "<end>", "OPen")
]
"""Token ids to bytes, as in a byte-level BPE: a character may be split over tokens, and a token may hold several."""


def decode(token_ids: Sequence[int]) -> str:
    return b"".join(VOCABULARY[token] for token in token_ids).decode(errors="replace")


def encode(text: str) -> list[int]:
    return list(text.encode())


def split(token_ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Chunks of these sizes, again and again; a size of 0 is a chunk that brought nothing."""
    chunks, start = [], 0
    for size in [*sizes, *([1] * len(token_ids))]:
        chunks.append(list(token_ids[start : start + size]))
        start += size
        if start >= len(token_ids):
            break
    return chunks


def added(
    chunks: Sequence[Sequence[int]], final: str | None, stop: Sequence[str] = (), decode: Any = decode
) -> list[Callable[[], str]]:
    stream = StreamText(decode, stop)
    last = len(chunks) - 1
    return [
        stream.add(chunk, (lambda: final or "") if i == last and final is not None else None)
        for i, chunk in enumerate(chunks)
    ]


def texts(chunks: Sequence[Sequence[int]], final: str | None, stop: Sequence[str] = ()) -> list[str]:
    return [text() for text in added(chunks, final, stop)]


TOKENS = st.lists(
    st.one_of(st.integers(0, len(VOCABULARY) - 1), st.integers(256, len(VOCABULARY) - 1), st.integers(97, 122)),
    max_size=40,
)
READABLE = st.text(max_size=30).map(encode)
SIZES = st.lists(st.integers(0, 8), max_size=20)


# ------------------------------------------------------------ the whole


@given(TOKENS | READABLE, SIZES)
@example(encode("日本語 👩‍🚀 é"), [1])
@example([0xE6, 0x97], [1])
@example([0xFF, 0x61, 0xE6, 0x28, 0xF0, 0x9F], [1])
def test_the_texts_of_all_chunks_are_the_final_text_however_tokens_are_split(
    tokens: list[int], sizes: list[int]
) -> None:
    final = decode(tokens)
    assert "".join(texts(split(tokens, sizes), final)) == final


@given(READABLE, SIZES)
def test_readable_text_is_released_up_to_the_last_whole_character(tokens: list[int], sizes: list[int]) -> None:
    """Without a final text: what is out can only lack the bytes of one unfinished character."""
    released = "".join(texts(split(tokens, sizes), None)).encode()
    assert bytes(tokens).startswith(released) or b"\xef\xbf\xbd" in bytes(tokens)
    assert len(tokens) - len(released) <= 3 or b"\xef\xbf\xbd" in bytes(tokens)


def stopped(tokens: Sequence[int], stop: Sequence[str]) -> tuple[list[int], str] | None:
    """As an engine stops: at the first token that completes a stop string, which is then cut out of the text."""
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[:end])
        matches = [match for match in stop if match in text]
        if matches:
            return list(tokens[:end]), text[: text.find(matches[0])]
    return None


@given(
    TOKENS, SIZES, st.lists(st.sampled_from(["STOP", "OP", "<end>", "o w", "lo", "語日", "STOPS", "aa"]), max_size=3)
)
@example([*encode("a STO"), 264], [1], ["STOPS", "STOP"])
@example([*encode("x"), 264, 265, *encode("P")], [1], ["STOP"])
@example([*encode("x S"), *encode("TO"), *encode("P")], [2], ["STOP"])
def test_a_stop_string_is_never_shown_whatever_tokens_it_is_split_over(
    tokens: list[int], sizes: list[int], stop: list[str]
) -> None:
    ended = stopped(tokens, stop)
    ids, final = ended or (tokens, decode(tokens))
    assert "".join(texts(split(ids, sizes), final, stop)) == final


# ------------------------------------------------------------ piece by piece


def test_text_comes_with_the_chunk_that_completes_it() -> None:
    assert texts([[256], [257], [258]], "hello world") == ["he", "llo", " world"]


@pytest.mark.parametrize("character", ["é", "日", "👩"])
def test_a_character_split_over_tokens_waits_for_its_last_byte(character: str) -> None:
    tokens = encode(character)
    assert texts([[97], *([token] for token in tokens), [98]], None) == ["a", *[""] * (len(tokens) - 1), character, "b"]


def test_an_unfinished_character_at_the_end_is_shown_as_the_final_text_has_it() -> None:
    tokens = encode("a日")[:3]
    assert texts([[tokens[0]], [tokens[1]], [tokens[2]]], decode(tokens)) == ["a", "", "\ufffd"]


def test_a_replacement_character_that_the_model_really_wrote_comes_with_the_next_token() -> None:
    assert texts([encode("a"), encode("\ufffd"), encode("b")], None) == ["a", "", "\ufffdb"]


def test_the_start_of_a_stop_string_is_held_back_until_it_is_refuted() -> None:
    chunks = [encode("go S"), encode("TO"), encode("RE")]
    assert texts(chunks, None, ["STOP"]) == ["go ", "", "STORE"]


def test_the_start_of_a_stop_string_is_held_back_within_a_token() -> None:
    assert texts([encode("a<en"), encode("try>")], "a<entry>", ["<end>"]) == ["a", "<entry>"]


def test_what_is_held_back_is_the_longest_start_of_any_stop_string() -> None:
    assert texts([encode("xab"), encode("a")], None, ["b!", "aba!"]) == ["x", ""]


def test_a_stop_string_is_left_out_with_the_text_behind_it() -> None:
    assert texts([encode("say ST"), [*encode("OPen")]], "say ", ["STOP"]) == ["say ", ""]


def test_an_empty_last_chunk_brings_what_was_held_back() -> None:
    assert texts([encode("go ST"), []], "go ST", ["STOP"]) == ["go ", "ST"]


# ------------------------------------------------------------ asked for late, often, or never


@given(TOKENS, SIZES, st.randoms(use_true_random=False))
def test_text_is_the_same_in_whatever_order_it_is_asked_for(
    tokens: list[int], sizes: list[int], shuffler: random.Random
) -> None:
    final = decode(tokens)
    chunks = split(tokens, sizes)
    late = added(chunks, final, ["STOP", "lo"])
    order = [*range(len(late)), *range(len(late))]
    shuffler.shuffle(order)
    found = {i: late[i]() for i in order}
    assert [found[i] for i in range(len(late))] == texts(chunks, final, ["STOP", "lo"])


def test_text_asked_for_twice_is_decoded_once() -> None:
    calls: list[Sequence[int]] = []

    def counting(token_ids: Sequence[int]) -> str:
        calls.append(token_ids)
        return decode(token_ids)

    (text,) = added([encode("abc")], None, decode=counting)
    assert (text(), len(calls)) == ("abc", 2)
    assert (text(), len(calls)) == ("abc", 2)


def test_nothing_is_decoded_until_text_is_asked_for() -> None:
    def never(token_ids: Sequence[int]) -> str:
        raise AssertionError("decoded")

    added([encode("abc")] * 100, None, decode=never)


def test_decoding_looks_at_the_last_few_chunks_alone_however_long_the_stream() -> None:
    lengths: list[int] = []

    def measuring(token_ids: Sequence[int]) -> str:
        lengths.append(len(token_ids))
        return decode(token_ids)

    for text in added([[97]] * 500, None, decode=measuring):
        text()
    assert max(lengths) <= 2


# ------------------------------------------------------------ completions and prompts


class FakeTransformers:
    """Enough of a transformers tokenizer."""

    def __call__(self, text: str) -> Mapping[str, list[int]]:
        return {"input_ids": encode(text)}

    def decode(self, token_ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not clean_up_tokenization_spaces
        assert isinstance(token_ids, list)
        return decode([token for token in token_ids if token != 0 or not skip_special_tokens])

    def apply_chat_template(self, messages: list[Any], **options: Any) -> list[int]:
        assert options == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        if any(message["role"] == "robot" for message in messages):
            raise ValueError("unknown role")  # as a template's own raise_exception() does
        return encode("".join(f"{message['role']}: {message['content']}\n" for message in messages))


@pytest.fixture
def tokenizer() -> Tokenizer:
    made = Tokenizer.__new__(Tokenizer)
    made.inner = FakeTransformers()
    return made


def completion(tokens: Sequence[int], stop_match: str | int | None = None) -> Completion:
    return Completion((1,), tuple(tokens), None, "stop", stop_match)


@pytest.mark.parametrize(
    ("tokens", "match", "text"),
    [
        (encode("hello"), None, "hello"),
        (encode("a STOP"), "STOP", "a "),
        (encode("a STOPping"), "STOP", "a "),
        ([*encode("ab"), 7], 7, "ab"),
        (encode("ab"), 7, "ab"),
        ([7, *encode("ab")], 7, "\x07ab"),
        ([], 7, ""),
        ([], None, ""),
        (encode("cut off"), "never there", "cut off"),
    ],
)
def test_a_completions_text_lacks_what_stopped_it(
    tokenizer: Tokenizer, tokens: list[int], match: str | int | None, text: str
) -> None:
    assert tokenizer.completion_text(completion(tokens, match)) == text


def test_special_tokens_are_left_out_of_text_or_kept(tokenizer: Tokenizer) -> None:
    whole = completion([0, *encode("a")])
    assert tokenizer.completion_text(whole) == "a"
    assert tokenizer.completion_text(whole, skip_special_tokens=False) == "\x00a"


def test_prompts_are_texts_token_ids_or_chat_messages(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hi") == encode("hi")
    assert tokenizer.encode([5, 6]) == [5, 6]
    messages: list[Message] = [{"role": "user", "content": "hi"}]
    assert tokenizer.encode(messages) == encode("user: hi\n")


@pytest.mark.parametrize(
    ("message", "rule"),
    [({"content": "no role"}, 'each with a "role"'), ({"role": "robot", "content": ""}, "unknown role")],
)
def test_messages_that_do_not_fit_the_template_are_a_config_error(
    tokenizer: Tokenizer, message: Message, rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        tokenizer.encode([message], "prompts[3]")
    assert caught.value.field == "prompts[3]"


class Tensor:
    def tolist(self) -> list[int]:
        return [1, 2]


@pytest.mark.parametrize("prompt", [[1, 2], (1, 2), range(1, 3), Tensor()])
def test_token_ids_may_be_any_sequence_of_ints_or_a_tensor(prompt: Any) -> None:
    assert check_token_ids(prompt, "prompt") == [1, 2]


@pytest.mark.parametrize("prompt", [[], [1.0], [True], [None], ["a"], b"ab", "ab", None, 7, {1: 2}, [[1]]])
def test_what_is_not_a_prompt_is_a_config_error(prompt: Any) -> None:
    with pytest.raises(ConfigError, match="must be a text, a non-empty list of token ids, or a list of chat messages"):
        check_token_ids(prompt, "prompt")
