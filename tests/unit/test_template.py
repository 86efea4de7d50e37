"""Tokens between two turns of the model, for templates of several styles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import sglrollout as sr
from sglrollout.session.template import ChatTemplate, _warn_once
from sglrollout.text import Tokenizer
from sglrollout.types import Message

pytestmark = pytest.mark.timeout(60)

SPECIAL = [
    *("<|begin|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<s>", "</s>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<tool_call>", "</tool_call>"),
    *("<|user|>", "<|assistant|>", "<|observation|>"),
]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n<tool_call>...</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == 'user') or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
LLAMA3 = """
{{- '<|begin|>' }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\n\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL = """
{{- '<s>' }}
{%- set ns = namespace(called=false, user=true) %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if not ns.called %}{{- raise_exception('Tool results must follow tool calls') }}{%- endif %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
            {{- ', "id": "' + call.id + '"}' }}
        {%- endfor %}
        {{- ']</s>' }}
        {%- set ns.called = true %}
    {%- else %}
        {%- if (message.role == 'user') != ns.user %}
            {{- raise_exception('roles must alternate user/assistant') }}
        {%- endif %}
        {%- set ns.user = not ns.user %}
        {%- set ns.called = false %}
        {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
        {%- else %}{{- message.content + '</s>' }}{%- endif %}
    {%- endif %}
{%- endfor %}
"""
TEXT_ONLY = (
    "{% for message in messages %}### {{ message.role | capitalize }}:\n{{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
GLM = (
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]
USER: Message = {"role": "user", "content": "What is 1 + 2?"}
RESULT: Message = {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "3"}
NEXT: Message = {"role": "user", "content": "And twice that?"}


def said(text: str, *calls: object) -> Message:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Tokenizer:
    tokenizer = Tokenizer(str(tiny_model))
    tokenizer.inner.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


@pytest.fixture
def use(plain: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``use(template)``: the tokenizer with that template."""

    def use(source: str, **options: Any) -> ChatTemplate:
        monkeypatch.setattr(plain.inner, "chat_template", source)
        ends = plain.inner.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "</s>"])
        return ChatTemplate(plain, ends, **options)

    return use


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.inner(text, add_special_tokens=False)["input_ids"])


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def rendered(tokenizer: Tokenizer, messages: Sequence[Message], tools: Any = None, opens: bool = True) -> str:
    return str(
        tokenizer.inner.apply_chat_template(list(messages), tools=tools, add_generation_prompt=opens, tokenize=False)
    )


# ------------------------------------------------------------ the whole is what the template renders

ANSWER, QUESTION = said("It is 3."), [USER]
CALLED = said("", CALL)
WITH_SYSTEM = [{"role": "system", "content": "Be brief."}, USER]

CASES = [
    pytest.param(CHATML, QUESTION, [(ANSWER, "It is 3.<|im_end|>", [NEXT])], None, id="chatml"),
    pytest.param(
        CHATML,
        WITH_SYSTEM,
        [(CALLED, "<|im_end|>", [RESULT]), (ANSWER, "It is 3.<|im_end|>", [NEXT])],
        None,
        id="chatml-with-a-tool",
    ),
    pytest.param(QWEN3, WITH_SYSTEM, [(ANSWER, "It is 3.<|im_end|>", [NEXT])], None, id="qwen3"),
    pytest.param(
        QWEN3,
        WITH_SYSTEM,
        [
            (
                CALLED,
                '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>',
                [RESULT, {**RESULT, "content": "5"}],
            ),
            (ANSWER, "It is 3.<|im_end|>", [NEXT]),
        ],
        TOOLS,
        id="qwen3-with-tools",
    ),
    pytest.param(LLAMA3, WITH_SYSTEM, [(ANSWER, "It is 3.<|eot_id|>", [NEXT])], None, id="llama3"),
    pytest.param(
        LLAMA3,
        QUESTION,
        [
            (CALLED, '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>', [RESULT]),
            (ANSWER, "It is 3.<|eot_id|>", [NEXT]),
        ],
        TOOLS,
        id="llama3-with-tools",
    ),
    pytest.param(MISTRAL, QUESTION, [(ANSWER, "It is 3.</s>", [NEXT])], None, id="mistral"),
    pytest.param(
        MISTRAL,
        QUESTION,
        [
            (CALLED, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "call00000"}]</s>', [RESULT]),
            (ANSWER, "It is 3.</s>", [NEXT]),
        ],
        None,
        id="mistral-with-tools",
    ),
    pytest.param(TEXT_ONLY, WITH_SYSTEM, [(ANSWER, "It is 3.", [NEXT])], None, id="text-only"),
    pytest.param(
        GLM, QUESTION, [(ANSWER, "It is 3.<|user|>", [NEXT]), (ANSWER, "It is 3.<|user|>", [NEXT])], None, id="glm"
    ),
]


@pytest.mark.parametrize(("source", "opening", "turns", "tools"), CASES)
def test_opening_outputs_and_what_is_between_are_the_tokens_of_the_whole(
    source: str, opening: Any, turns: Any, tools: Any, use: Any, plain: Tokenizer
) -> None:
    template, messages = use(source), list(opening)
    ids = template.opening(messages, tools or ())
    assert ids == plain.inner.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    for message, output, new in turns:
        sampled = ids_of(plain, output)
        messages.append(message)
        ids += sampled + template.between(messages, new, sampled, tools or ())
        messages += new
    whole = rendered(plain, messages, tools)
    assert text_of(plain, ids) == whole
    assert ids == ids_of(plain, whole)


# ------------------------------------------------------------ what the model said stays as it was


def test_thinking_that_the_template_would_strip_stays(use: Any, plain: Tokenizer) -> None:
    template, thought = use(QWEN3), "<think>\n1 + 2 is 3\n</think>\n\nIt is 3."
    sampled = ids_of(plain, f"{thought}<|im_end|>")
    between = template.between([USER, said(thought)], [NEXT], sampled)
    assert text_of(plain, between) == "\n<|im_start|>user\nAnd twice that?<|im_end|>\n<|im_start|>assistant\n"
    assert "1 + 2 is 3" not in rendered(plain, [USER, said(thought), NEXT])


def test_white_space_that_the_template_would_trim_stays(use: Any, plain: Tokenizer) -> None:
    between = use(LLAMA3).between([USER, said("It is 3. \n")], [NEXT], ids_of(plain, "It is 3. \n<|eot_id|>"))
    assert text_of(plain, between).startswith("<|start_header_id|>user<|end_header_id|>")


def test_a_turn_that_was_cut_is_closed_by_the_template(use: Any, plain: Tokenizer) -> None:
    between = use(CHATML).between([USER, said("It is")], [NEXT], ids_of(plain, "It is"))
    assert text_of(plain, between).startswith("<|im_end|>\n<|im_start|>user\n")


def test_a_turn_that_was_closed_by_another_end_token_is_not_closed_twice(use: Any, plain: Tokenizer) -> None:
    template = use(LLAMA3)
    between = template.between([USER, CALLED], [RESULT], ids_of(plain, '{"name": "add"}<|eom_id|>'))
    assert text_of(plain, between).startswith("<|start_header_id|>ipython<|end_header_id|>\n\n3<|eot_id|>")


def test_a_role_that_begins_with_an_end_token_is_kept(use: Any, plain: Tokenizer) -> None:
    between = use(GLM).between([USER, ANSWER], [NEXT], ids_of(plain, "It is 3.<|endoftext|>"))
    assert text_of(plain, between) == "<|user|>\nAnd twice that?<|assistant|>\n"


def test_turns_that_the_model_went_on_with_by_itself_are_one(use: Any, plain: Tokenizer) -> None:
    between = use(MISTRAL).between([USER, said("It"), said("is 3.")], [NEXT], ids_of(plain, "is 3.</s>"))
    assert text_of(plain, between) == "[INST]And twice that?[/INST]"


def test_a_conversation_that_began_with_token_ids_goes_on(use: Any, plain: Tokenizer) -> None:
    between = use(CHATML).between([ANSWER], [NEXT], ids_of(plain, "It is 3.<|im_end|>"))
    assert text_of(plain, between) == "\n<|im_start|>user\nAnd twice that?<|im_end|>\n<|im_start|>assistant\n"


def test_the_template_gets_the_names_it_knows(use: Any, plain: Tokenizer) -> None:
    template = use(QWEN3, options={"enable_thinking": False})
    sampled = ids_of(plain, "It is 3.<|im_end|>")
    for ids in (template.opening([USER]), template.between([USER, ANSWER], [NEXT], sampled)):
        assert text_of(plain, ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_tools_are_shown_to_the_model_or_a_warning_says_that_they_are_not(
    use: Any, plain: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    assert '"name": "add"' in text_of(plain, use(QWEN3).opening([USER], TOOLS))
    assert not caplog.records
    hidden = [{"type": "function", "function": {"name": "subtract"}}]
    for _ in range(2):
        use(CHATML).opening([USER], hidden)
    assert caplog.text.count("does not tell the model of its tools (subtract)") == 1


def test_warnings_are_not_remembered_without_a_bound() -> None:
    for i in range(2000):
        _warn_once(f"the tool {i}")
    assert _warn_once.cache_info().currsize < 1000


# ------------------------------------------------------------ tokenizers


def test_a_tokenizer_that_puts_a_space_before_every_text_does_not_put_one_between(plain: Tokenizer) -> None:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<unk>", "</s>", "▁", *"\n#:.,?!'", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+"]
    inner = Inner(models.BPE({letter: i for i, letter in enumerate(letters)}, [], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = Tokenizer.__new__(Tokenizer)
    tokenizer.inner = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", chat_template=TEXT_ONLY)
    template, sampled = ChatTemplate(tokenizer), ids_of(tokenizer, "Three.")
    assert tokenizer.inner.convert_ids_to_tokens(ids_of(tokenizer, "\n\n#"))[0] == "▁"
    messages = [USER, said("Three.")]
    ids = template.opening([USER]) + sampled[1:] + template.between(messages, [NEXT], sampled)
    assert text_of(tokenizer, ids) == rendered(tokenizer, [*messages, NEXT])


# ------------------------------------------------------------ templates that cannot be continued


def refusal(template: ChatTemplate, *arguments: Any) -> str:
    with pytest.raises(sr.ConfigError) as caught:
        template.between(*arguments)
    assert caught.value.field == "messages"
    assert "through add_tokens" in str(caught.value)
    return str(caught.value.rule)


def test_a_template_that_raises_is_refused_with_its_reason(use: Any) -> None:
    assert "roles must alternate" in refusal(use(MISTRAL), [USER, ANSWER], [NEXT, NEXT], [])
    assert "Tool results must follow tool calls" in refusal(use(MISTRAL), [USER, ANSWER], [RESULT], [])


def test_a_template_that_does_not_show_what_the_model_said_is_refused(use: Any) -> None:
    source = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    assert "does not show what the model said" in refusal(use(source), [USER, ANSWER], [NEXT], [])


def test_a_template_that_leaves_a_role_out_is_refused(use: Any) -> None:
    source = CHATML.replace("in messages", "in messages if message.role in ('user', 'assistant')")
    assert "does not put messages of role tool after" in refusal(use(source), [USER, CALLED], [RESULT], [])


def test_a_template_that_moves_messages_to_the_front_is_refused(use: Any) -> None:
    source = (
        "{% for message in messages if message.role == 'system' %}{{ message.content }}\n{% endfor %}"
        "{% for message in messages if message.role != 'system' %}{{ message.content }}\n{% endfor %}"
    )
    late: Message = {"role": "system", "content": "Be brief."}
    assert "messages of role system" in refusal(use(source), [USER, ANSWER], [late, NEXT], [])


def test_results_that_only_follow_calls_are_found_there(use: Any, plain: Tokenizer) -> None:
    source = (
        "{% set ns = namespace(called=false) %}{% for m in messages %}"
        "{% if m.tool_calls %}{% set ns.called = true %}CALL</s>"
        "{% elif m.role != 'tool' or ns.called %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    between = use(source).between([USER, CALLED], [RESULT], ids_of(plain, "CALL</s>"))
    assert text_of(plain, between) == "3</s>"


def test_an_opening_that_does_not_fit_is_refused(use: Any) -> None:
    with pytest.raises(sr.ConfigError, match=r"messages must fit the model's chat template .*roles must alternate"):
        use(MISTRAL).opening([USER, USER])


def test_a_tokenizer_without_a_template_is_refused(use: Any) -> None:
    with pytest.raises(sr.ConfigError, match="must be a tokenizer with a chat template"):
        use(None)
