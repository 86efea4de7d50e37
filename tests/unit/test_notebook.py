"""What a notebook shows: all of it escaped, bounded in size, with and without a tokenizer."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from typing import Any

import pytest

import sglrollout as sr
from sglrollout import notebook
from sglrollout.collect.stats import CollectReport
from sglrollout.session.conversation import _whole_text
from sglrollout.types import VersionSpan
from sglrollout.weights.report import SyncReport

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\" onmouseover='alert(3)' </div> &lt; $x$"
TAGS = {"div", "span", "table", "thead", "tbody", "tr", "th", "td", "i"}
WORDS = ["Why", " not", "?", " <b>", " é", "", "\ufffd", " end"]


class Page(HTMLParser):
    """Checks that every tag and attribute is one of ours, and that all are closed; keeps the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text, self.titles = "", list[str]()
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        assert {name for name, _ in attrs} <= {"style", "class", "title"}, attrs
        self.titles += [str(value) for name, value in attrs if name == "title"]
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page(shown: Any) -> Page:
    html = shown._repr_html_()
    html.encode()
    return Page(html)


def words(vocabulary: Sequence[str]) -> Callable[[sr.Completion], str]:
    return lambda completion: "".join(vocabulary[token] for token in completion.token_ids)


def completion(
    token_ids: Sequence[int] = (0, 1, 2), vocabulary: Sequence[str] | None = WORDS, **given: Any
) -> sr.Completion:
    logprobs = tuple(-0.5 * (place + 1) for place in range(len(token_ids)))
    return sr.Completion(
        **{
            "prompt_ids": (0,),
            "token_ids": tuple(token_ids),
            "logprobs": logprobs,
            "finish_reason": "stop",
            "weight_versions": (VersionSpan(3, 0, len(token_ids)),),
            "engine": "engine-0",
            "_detokenize": None if vocabulary is None else words(vocabulary),
            **given,
        }
    )


# ------------------------------------------------------------ a completion


def test_a_completion_shows_what_it_is_and_each_token_with_its_logprob() -> None:
    shown = page(completion(stop_match=2))
    assert "Why not?" in shown.text
    assert shown.titles == ["-0.500", "-1.000", "-1.500"]
    for fact in ("stop (2)", "1 + 3", "-1", "3 (0:3)", "engine-0"):
        assert fact in shown.text


def test_what_a_model_says_is_text_and_nothing_else() -> None:
    evil = completion((0, 1), [EVIL, "\ud800"], error=RuntimeError(EVIL), engine=EVIL, stop_match=EVIL)
    shown = page(evil)
    assert shown.text.count("<script>alert(1)</script>") >= 4  # prompt, token, error, engine, stop string
    assert "<script" not in evil._repr_html_()
    assert "mathjax_ignore" in evil._repr_html_()  # $x$ is no formula


def test_a_character_of_several_tokens_is_shown_once_with_its_least_likely() -> None:
    def decode(one: sr.Completion) -> str:
        return bytes(one.token_ids).decode(errors="replace")

    shown = page(completion("aé€".encode(), logprobs=(-1.0, -2.0, -0.1, -0.2, -5.0, -0.3), _detokenize=decode))
    assert "aé€" in shown.text
    assert shown.titles == ["-1.000", "-2.000", "-5.000"]


def test_a_tokenizer_that_drops_a_leading_space_still_shows_it_within_a_text() -> None:
    def decode(one: sr.Completion) -> str:
        return "".join(("▁a", "▁b")[token] for token in one.token_ids).replace("▁", " ").removeprefix(" ")

    assert "a b a" in page(completion((0, 1, 0), _detokenize=decode)).text


def test_texts_that_do_not_add_up_are_shown_whole_and_without_colours() -> None:
    shown = page(completion((0, 1), _detokenize=lambda one: "what it said" if len(one.token_ids) > 1 else "<x>"))
    assert "what it said" in shown.text
    assert shown.titles == []


def test_tokens_that_the_model_did_not_sample_have_no_colour_and_do_not_count() -> None:
    shown = page(completion(loss_mask=(1, 0, 1), logprobs=(-1.0, 0.0, -3.0)))
    assert shown.titles == ["-1.000", "-3.000"]
    assert completion(loss_mask=(1, 0, 1), logprobs=(-1.0, 0.0, -3.0)).mean_logprob == -2.0


@pytest.mark.parametrize("logprob", [0.0, -math.inf, math.nan, 0.1])
def test_any_number_has_a_colour(logprob: float) -> None:
    assert page(completion((0,), logprobs=(logprob,))).titles == [f"{logprob:.3f}"]


def test_without_logprobs_it_is_plain_text() -> None:
    shown = page(completion(logprobs=None))
    assert "Why not?" in shown.text
    assert shown.titles == []
    assert completion(logprobs=None).mean_logprob is None


def test_without_a_tokenizer_it_shows_token_ids() -> None:
    assert "0 1 2" in page(completion(vocabulary=None)).text
    assert "… 488 more tokens" in page(completion((7,) * 1000, vocabulary=None)).text


def test_one_that_was_pickled_shows_the_text_that_it_was_given() -> None:
    copy = pickle.loads(pickle.dumps(replace(completion(), _detokenize=words(WORDS))))
    assert "Why not?" in page(copy).text


def test_an_empty_one_is_shown_too() -> None:
    shown = page(completion((), weight_versions=(), finish_reason="error", error=ValueError("too long")))
    assert "error: ValueError: too long" in shown.text


def test_a_huge_one_is_bounded() -> None:
    asked = 0

    def decode(one: sr.Completion) -> str:
        nonlocal asked
        asked += len(one.token_ids) < 10
        return "word " * len(one.token_ids)

    huge = completion((0,) * 100_000, prompt_ids=(0,) * 100_000, _detokenize=decode)
    spans = tuple(VersionSpan(version, version, version + 1) for version in range(100_000))
    html = replace(huge, weight_versions=spans)._repr_html_()
    assert len(html) < 100_000
    assert asked < 2_000
    assert Page(html).text.count("… 99,488 more tokens") == 2


# ------------------------------------------------------------ a group


def group(num_samples: int = 2, prompt: sr.Prompt = "Why?", **given: Any) -> sr.Group:
    samples = tuple(completion(index=index) for index in range(num_samples))
    return sr.Group(**{"prompt": prompt, "prompt_ids": (0,), "completions": samples, **given})


def test_a_group_has_a_row_for_each_sample() -> None:
    html = group(rewards=(0.25, None))._repr_html_()
    assert html.count("<tr>") == 3
    shown = Page(html)
    assert "Why?" in shown.text
    assert "0.25" in shown.text
    assert shown.titles == ["-0.500", "-1.000", "-1.500"] * 2


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (EVIL, "<script>alert(1)"),
        ([{"role": "user", "content": EVIL}], "user: <script>alert(1)"),
        ([{"role": "user", "content": [{"type": "text", "text": "hm"}]}], "hm"),
        ([0, 1], "Why"),
    ],
)
def test_any_prompt_is_shown_as_text(prompt: sr.Prompt, said: str) -> None:
    assert said in page(group(prompt=prompt)).text


def test_a_group_without_samples_or_tokenizer_is_shown() -> None:
    assert "5 6" in page(sr.Group([5, 6], (5, 6), ())).text
    assert "0 1 2" in page(sr.Group([5, 6], (5, 6), (completion(vocabulary=None),))).text


def test_a_huge_group_is_bounded() -> None:
    long = completion((0,) * 10_000, [EVIL])
    html = sr.Group(EVIL * 10_000, (0,) * 10_000, (long,) * 4096)._repr_html_()
    assert len(html) < 600_000
    assert "… 4,080 more samples" in Page(html).text
    usual = completion((0,) * 1_000, [" word"])
    assert len(sr.Group("Why?", (0,), (usual,) * 4096)._repr_html_()) < 120_000


# ------------------------------------------------------------ reports

SYNC = SyncReport(
    version=4,
    method="portable",
    why_portable=EVIL,
    mode="retract",
    num_bytes=3 * 10**9,
    num_tensors=338,
    num_buckets=6,
    num_engines=2,
    plan_s=0.0,
    wake_s=0.0,
    pause_s=0.002,
    gather_s=0.01,
    load_s=0.02,
    transfer_s=0.05,
    flush_s=0.001,
    resume_s=0.001,
    total_s=0.06,
    copy_bytes_per_s=2e12,
)


def test_a_sync_report_shows_its_phases() -> None:
    shown = page(SYNC)
    for said in (
        "3 GB in 338 tensors and 6 buckets",
        "60 GB/s",
        "portable, retract, because <script>",
        "transfer50 ms",
    ):
        assert said in shown.text
    assert "wake" not in shown.text  # which took no time
    assert page(replace(SYNC, total_s=0.0, transfer_s=0.0, copy_bytes_per_s=0.0)).text


def test_a_report_of_a_batch_shows_every_number() -> None:
    report = CollectReport(4, 32, 1000, 2.0, 0.5, 3, 0.5, 1, 0.25, 0.0, 31.25, None, None, 1, {EVIL: 2})
    shown = page(report)
    assert "response_len_mean31.25" in shown.text
    assert "<script>alert(1)" in shown.text
    assert "reward_mean" not in shown.text


def test_a_text_is_cut_before_it_is_escaped() -> None:
    assert notebook.text("<" * 10, 3) == "&lt;&lt;&lt;<i> … 7 more characters</i>"


def test_a_conversation_shows_its_turns_in_colours_too() -> None:
    last = completion((1, 2))
    whole = completion((0, 1, 2, 1, 2), loss_mask=(1, 1, 0, 1, 1))
    whole = replace(whole, _detokenize=partial(_whole_text, last, words(WORDS)))
    shown = page(whole)
    assert "Why not? not?" in shown.text
    assert len(shown.titles) == 4
