"""Tokenizers of published families, small and made offline, with the families' chat templates and control tokens.

TRL carries the templates byte by byte as their checkpoints have them (its README names each checkpoint); they are read
from the installed package. Mistral's is not among them: it is written here in the form that its checkpoints have.
"""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from written_calls import FORMS, glm, xml

TEMPLATES = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"

MISTRAL = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}"
    "{%- if tools and loop.index0 == (messages | map(attribute='role') | list).index('user') %}"
    "{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}"
    "{%- endif %}"
    "{{- '[INST]' + message.content + '[/INST]' }}"
    "{%- elif message.role == 'system' %}"
    "{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}"
    "{%- elif message.role == 'assistant' and message.tool_calls %}"
    "{{- '[TOOL_CALLS][' }}"
    "{%- for call in message.tool_calls %}"
    "{%- if not call.id is defined or call.id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{%- endif %}"
    '{{- \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}"
    '{{- \', "id": "\' + call.id + \'"}\' + (", " if not loop.last else "]") }}'
    "{%- endfor %}"
    "{{- eos_token }}"
    "{%- elif message.role == 'assistant' %}"
    "{{- message.content + eos_token }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{%- endif %}"
    '{{- \'[TOOL_RESULTS]{"content": \' + (message.content | tojson) + \', "call_id": "\' }}'
    "{{- message.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- endif %}"
    "{%- endfor %}"
)

SPEECH = """The quick brown fox asks for 12 + 30 tools; a user, an assistant and a system answer: it is 42.
<tools> <function=add> <parameter=a> {"name": "add", "arguments": {"a": 1, "b": 2}} </function>
call:add{a:1} response: content, thinking, therefore the result is 7 of 9, Call, User, analysis commentary final json
"""


@dataclass(frozen=True)
class Family:
    """A published family.

    Attributes:
      template: File of TRL's, or the template itself.
      special: Special tokens; the first is the beginning of a text, the second its end.
      tags: Further tokens of its own that are not special.
      call: Reply that calls `add` with a=1 and b=2, in the family's form, its end of turn left out.
      ends: Tokens that end a turn: without a call, and with one.
      settings: Variables of the template.
      tells: How a tool's answer is found in its text.
    """

    template: str
    special: tuple[str, ...]
    call: str
    ends: tuple[str, str]
    tags: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


_HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
_XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
    "</tool_call>"
)
_CHATML = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
_IM_END = ("<|im_end|>", "<|im_end|>")
_QWEN_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_LLAMA = ("<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
_DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
_DEEPSEEK_TAGS = (
    *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<think>", "</think>"),
)
_GLM = ("<sop>", "<|endoftext|>", "[gMASK]", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", *_QWEN_TAGS)
_GLM_CALL = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n"
    "</tool_call>"
)
_GEMMA_4 = (
    *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", '<|"|>', "<|think|>"),
)
_HARMONY = ("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>")

FAMILIES = {
    "qwen2.5": Family("qwen2_5.jinja", _CHATML, _HERMES, _IM_END, _QWEN_TAGS[:2]),
    "qwen3": Family("qwen3.jinja", _CHATML, _HERMES, _IM_END, _QWEN_TAGS),
    "qwen3 without thinking": Family("qwen3.jinja", _CHATML, _HERMES, _IM_END, _QWEN_TAGS, {"enable_thinking": False}),
    "qwen3.5": Family("qwen3_5_think.jinja", _CHATML, _XML, _IM_END, _QWEN_TAGS),
    "llama 3.1": Family(
        "llama3_1.jinja", _LLAMA, '{"name": "add", "parameters": {"a": 1, "b": 2}}', ("<|eot_id|>", "<|eot_id|>")
    ),
    "gemma 3": Family(
        "gemma3.jinja",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "```tool_code\nadd(a=1, b=2)\n```",
        ("<end_of_turn>", "<end_of_turn>"),
    ),
    "gemma 4": Family(
        "gemma4.jinja", _GEMMA_4, "<|tool_call>call:add{a:1,b:2}<tool_call|>", ("<turn|>", "<|tool_response>")
    ),
    "deepseek v3": Family(
        "deepseekv3.jinja",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        _DEEPSEEK_CALL,
        ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        _DEEPSEEK_TAGS,
    ),
    "glm 4.5": Family("glm4moe.jinja", _GLM, _GLM_CALL, ("<|user|>", "<|observation|>"), _GLM_TAGS),
    "gpt-oss": Family(
        "gptoss.jinja",
        (*_HARMONY, "<|constrain|>"),
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}',
        ("<|return|>", "<|call|>"),
    ),
    "phi 3.5": Family(
        "phi3_5.jinja",
        ("<s>", "<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"),
        _HERMES,
        ("<|end|>", "<|end|>"),
    ),
    "lfm2": Family(
        "lfm2_v2.jinja",
        ("<|startoftext|>", "<|im_end|>", "<|im_start|>"),
        "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>",
        _IM_END,
        ("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>"),
    ),
    "mistral": Family(
        MISTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        ),
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]',
        ("</s>", "</s>"),
    ),
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Tokenizer of a family, with its template, control tokens and tags."""
    return tokenizer_for(FAMILIES[name])


def tokenizer_for(family: Family, extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Tokenizer of a family, with more special tokens."""
    template = (TEMPLATES / family.template).read_text() if family.template.endswith(".jinja") else family.template
    return small_tokenizer((*family.special, *extra), family.tags, template)


def chatml() -> PreTrainedTokenizerFast:
    """Tokenizer with a template that writes role and content of each message and nothing else, as SmolLM2's does."""
    message = "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    opening = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    template = "{% for message in messages %}" + message + "{% endfor %}" + opening
    return small_tokenizer(("<|endoftext|>", "<|im_end|>", "<|im_start|>"), (), template)


@cache
def small_tokenizer(special: tuple[str, ...], tags: tuple[str, ...], template: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 500 tokens, with more of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([SPEECH] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[0],
        eos_token=special[1],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


# Families that the package `renderers` has too


def dump(value):
    return json.dumps(value, ensure_ascii=False)


def hermes(name, given):
    return f"<tool_call>\n{dump({'name': name, 'arguments': given})}\n</tool_call>"


def llama(name, given):
    return dump({"name": name, "parameters": given})


def deepseek(name, given):
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dump(given)}\n```<｜tool▁call▁end｜>"


def gemma(name, given):
    return FORMS["gemma 4"].write([(name, given)])


def gpt_oss(name, given):
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dump(given)}"


def kimi(name, given):
    return f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{dump(given)}<|tool_call_end|>"


def minimax(name, given):
    begin, end = MINIMAX
    return FORMS["minimax m2"].write([(name, given)]).removeprefix(begin).removesuffix(end)


@dataclass(frozen=True)
class Peer:
    """Family with its class in `renderers` and the form of its replies.

    Attributes:
      renderer: Name of the class, without "Renderer".
      options: Settings of the class.
      extra: Special tokens that the class looks up.
      call: Function that writes a call.
      broken: Text in the place of a call that cannot be parsed.
      section: Text before and after the calls of a reply.
      between: Text between two calls.
      thought: Form of reasoning; empty without reasoning.
      silent: Text that comes first in an answer without reasoning.
      answer: Form of an answer.
      before: Form of words before a call.
      header: End of the prompt that the class takes as part of the reply.
      prompts: True if prompts are compared.
      turns: True if the tokens of later turns are compared.
    """

    family: Family
    renderer: str
    options: dict[str, Any] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    call: Callable[[str, dict[str, Any]], str] = hermes
    broken: str = '<tool_call>\n{"name": "add", "arguments": {"a": 1,\n</tool_call>'
    section: tuple[str, str] = ("", "")
    between: str = "\n"
    thought: str = ""
    silent: str = ""
    answer: str = "{}"
    before: str = "{}\n"
    header: str = ""
    prompts: bool = True
    turns: bool = True

    def calls(self, *calls: str | tuple[str, dict[str, Any]]) -> str:
        """Write the calls of a reply; a text stands for itself."""
        begin, end = self.section
        return begin + self.between.join(one if isinstance(one, str) else self.call(*one) for one in calls) + end


def of(base, template="", **settings):
    """Family with another template of TRL's, and other variables of it."""
    return replace(FAMILIES[base], template=template or FAMILIES[base].template, settings=settings)


def without_template(end, opening, special, tags=()):
    """Family with a template of one line, for its replies alone."""
    template = (
        "{% for message in messages %}{{ message.role + message.content + '" + end + "' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '" + opening + "' }}{% endif %}{# " + (*special, *tags)[-1] + " #}"
    )
    return Family(template, ("<s>", end, *special), "", (end, end), tags)


OFF = {"enable_thinking": False}
THOUGHT = {"thought": "<think>\n{}\n</think>\n\n"}
OPENED = {"thought": "{}\n</think>\n\n", "silent": "</think>\n\n"}
XML = {"call": xml, "broken": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>"}
VISION = {"extra": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")}
LLAMA = {
    **{"call": llama, "broken": '{"name": "add", "parameters": {"a": 1,}', "between": "; "},
    "extra": ("<|end_of_text|>",),
}
GEMMA = {
    **{"call": gemma, "broken": "<|tool_call>call:add{a:1,b<tool_call|>", "between": "", "before": "{}"},
    **{"thought": "<|channel>thought\n{}<channel|>", "extra": ("<|image>", "<|image|>", "<image|>", "<|video|>")},
}
GLM = {"call": glm, "broken": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1\n</tool_call>"}
DEEPSEEK = {
    **{"call": deepseek, "broken": deepseek("add", {"a": 1}).replace("}", ",")},
    "section": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
}
AGAIN = "<|end|><|start|>assistant"
HARMONY = {
    **{"call": gpt_oss, "broken": gpt_oss("add", {"a": 1}).replace("}", ","), "between": "<|call|><|start|>assistant"},
    **{"thought": "<|channel|>analysis<|message|>{}" + AGAIN, "answer": "<|channel|>final<|message|>{}"},
    **{"before": "<|channel|>commentary<|message|>{}" + AGAIN, "header": "<|start|>assistant"},
}
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
MINIMAX = ("<minimax:tool_call>\n", "</minimax:tool_call>")
ALONE = {"prompts": False, "turns": False}
"""Arguments of a peer whose replies alone are compared."""

PEERS = {
    "qwen2.5": Peer(of("qwen2.5"), "Default", {"tool_parser": "qwen3"}, turns=False),
    "qwen3": Peer(of("qwen3"), "Qwen3", **THOUGHT),
    "qwen3 without thinking": Peer(of("qwen3", **OFF), "Qwen3", OFF),
    "qwen3 vl": Peer(of("qwen3", "qwen3_vl.jinja"), "Qwen3VL", **VISION, **THOUGHT),
    "qwen3.5": Peer(of("qwen3.5"), "Qwen35", **VISION, **XML, **OPENED),
    "qwen3.5 without thinking": Peer(of("qwen3.5", **OFF), "Qwen35", OFF, **VISION, **XML),
    "qwen3.6": Peer(of("qwen3.5", "qwen3_6.jinja"), "Qwen36", **VISION, **XML, **OPENED),
    "qwen3.8": Peer(of("qwen3.5", "qwen3_8.jinja"), "Qwen38", **VISION, **XML, **OPENED),
    "nemotron 3 nano": Peer(of("qwen3.5", "nemotron_3_nano.jinja"), "Nemotron3", **XML, **OPENED),
    "nemotron 3 super": Peer(of("qwen3.5", "nemotron_3_super.jinja"), "Nemotron3", **XML, **OPENED),
    "nemotron 3 ultra": Peer(of("qwen3.5", "nemotron_3_ultra.jinja"), "Nemotron3Ultra", **XML, **OPENED),
    "nemotron 3.5": Peer(of("qwen3.5", "nemotron_3_5_lightning.jinja"), "Nemotron35", **XML, **OPENED),
    "llama 3.1": Peer(of("llama 3.1"), "Llama3", **LLAMA),
    "llama 3.2": Peer(of("llama 3.1", "llama3_2.jinja", date_string="26 Jul 2024"), "Llama3", **LLAMA),
    "gemma 4": Peer(of("gemma 4", "gemma4_v5.jinja"), "Gemma4", **GEMMA),
    "gemma 4 with thinking": Peer(
        of("gemma 4", "gemma4_v5.jinja", enable_thinking=True), "Gemma4", {"enable_thinking": True}, **GEMMA
    ),
    "glm 4.5": Peer(of("glm 4.5"), "GLM45", **GLM, thought="\n<think>{}</think>\n", silent="\n<think></think>\n"),
    "glm 4.5 without thinking": Peer(of("glm 4.5", **OFF), "GLM45", OFF, **GLM),
    "deepseek r1": Peer(of("deepseek v3"), "DeepSeekR1", **DEEPSEEK, **OPENED),
    "gpt-oss": Peer(of("gpt-oss"), "GptOss", **HARMONY, **ALONE),
    "kimi k2": Peer(
        without_template(
            "<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>",
            ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", *FORMS["kimi k2"].special),
        ),
        "KimiK2",
        **{"call": kimi, "broken": kimi("add", {"a": 1}).replace("}", ","), "section": KIMI, "between": ""},
        **THOUGHT,
        **ALONE,
    ),
    "minimax m2": Peer(
        without_template(
            "[e~[", "]~b]ai\\n<think>\\n", ("]~!b[", "]~b]"), ("<think>", "</think>", *FORMS["minimax m2"].tags)
        ),
        "MiniMaxM2",
        **{"call": minimax, "broken": '<invoke name="add">\n<parameter name="a">1\n</invoke>\n', "between": ""},
        **{"section": MINIMAX, **OPENED, **ALONE},
    ),
}
