"""The chat formats of many language models, tools and media left out: as templates, and what of an answer is learnt.

Written anew after the templates beside the weights of the models that their names say. Each has a tokenizer's end of
text and what is learnt of an answer ``@`` in front of other turns and at the end, in which no template is read.
"""

from functools import cache
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from tests.support.chats import CHATML, byte_level


class Format(NamedTuple):
    """A format; ``learnt`` of an answer that others follow, ``last`` of the last one ("": the same).

    ``stripped``: white space around an answer goes; "lines": line breaks before it alone; "last line": of the last one.
    """

    template: str
    eos: str
    learnt: str
    last: str = ""
    stripped: bool | str = False
    system: bool = True


def turns(user: str, assistant: str, ask: str = "", system: str = "", begin: str = "", end: str = "") -> str:
    """Return the template of turns that are written alike, ``@`` where a message stands and ``~`` where it is stripped.

    ``end`` stands where nothing is asked.
    """

    def written(form: str) -> str:
        mark = "@" if "@" in form else "~"
        before, _, after = form.partition(mark)
        return f"{{{{ {before!r} + m.content{'' if mark == '@' else ' | trim'} + {after!r} }}}}"

    told = f"{{% if m.role == 'system' %}}{written(system)}{{% endif %}}" if system else ""
    return (
        f"{{{{ {begin!r} }}}}{{% for m in messages %}}{told}{{% if m.role == 'user' %}}{written(user)}{{% endif %}}"
        f"{{% if m.role == 'assistant' %}}{written(assistant)}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {ask!r} }}}}{{% else %}}{{{{ {end!r} }}}}{{% endif %}}"
    )


IM = "<|im_end|>"


def _chatml(opened: str = "") -> str:
    heads = [f"<|im_start|>{role}\n" for role in ("user", "assistant", "system")]
    user, told = (f"{head}@{IM}\n" for head in heads[::2])
    return turns(user, f"{heads[1]}@{IM}\n", heads[1] + opened, told)


_LLAMA3 = [f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("user", "assistant", "system")]
_COHERE = [f"<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>" for role in ("USER", "CHATBOT", "SYSTEM")]
_END_OF_TURN = "<|END_OF_TURN_TOKEN|>"
_TOLD_FIRST = (
    "{% if messages[0].role == 'system' %}{% set told = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set told = '' %}{% set rest = messages %}{% endif %}"
)
_QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set content = m.content %}{% set thought = '' %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\\n' + thought.strip('\\n') + "
    "'\\n</think>\\n\\n' + content.lstrip('\\n') }}{% else %}{{ content }}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}OPEN{% endif %}"
)
_NO_THOUGHTS = (
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)


def _wide(text: str) -> str:
    return text.replace("<|", "<\N{FULLWIDTH VERTICAL LINE}").replace("|>", "\N{FULLWIDTH VERTICAL LINE}>")


_DEEPSEEK = _wide(
    "{{ '<|begin▁of▁sentence|>' }}{% set ns = namespace(told='') %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.told = m.content %}{% endfor %}{{ ns.told }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<|User|>' + m.content }}{% endif %}{% if m.role == 'assistant' %}{% set content = m.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|Assistant|>' + content + '<|end▁of▁sentence|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>OPEN' }}{% endif %}"
)
_SENTENCE = _wide("<|end▁of▁sentence|>")
_LLAMA2 = (
    _TOLD_FIRST + "{% for m in rest %}{% if loop.index0 == 0 and told %}"
    "{% set content = '<<SYS>>\\n' + told + '\\n<</SYS>>\\n\\n' + m.content %}{% else %}{% set content = m.content %}"
    "{% endif %}{% if m.role == 'user' %}{{ '<s>[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' </s>' }}{% endif %}{% endfor %}"
)
_MISTRAL3 = (
    _TOLD_FIRST + "{{ '<s>' }}{% for m in rest %}{% if m.role == 'user' %}{% if loop.first and told %}"
    "{{ '[INST] ' + told + '\\n\\n' + m.content + '[/INST]' }}{% else %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + m.content | trim + '</s>' }}{% endif %}{% endfor %}"
)
_GEMMA3 = (
    _TOLD_FIRST + "{{ '<bos>' }}{% for m in rest %}{% set role = 'model' if m.role == 'assistant' else 'user' %}"
    "{{ '<start_of_turn>' + role + '\\n' + (told + '\\n\\n' if loop.first and told else '') }}{{ m.content | trim }}"
    "{{ '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
_FALCON = (
    "{% for m in messages %}{% if not loop.first %}{{ '\\n\\n' }}{% endif %}"
    "{{ ('User: ' if m.role == 'user' else 'Assistant: ' if m.role == 'assistant' else '') + m.content | trim }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)
_OLMO2 = (
    "{{ '<|endoftext|>' }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\\n' + m.content }}"
    "{{ '<|endoftext|>' + ('' if loop.last else '\\n') }}{% else %}{{ '<|' + m.role + '|>\\n' + m.content + '\\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_SMOLLM3 = (
    _TOLD_FIRST + "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "{% if '/no_think' in told %}{% set enable_thinking = false %}{% endif %}"
    "{{ '<|im_start|>system\\n## Metadata\\n\\nReasoning Mode: ' + ('/think' if enable_thinking else '/no_think') }}"
    "{{ '\\n\\n## Custom Instructions\\n\\n' }}"
    "{{ told.replace('/no_think', '').replace('/think', '').rstrip() or 'Help.' }}"
    "{{ '\\n\\n<|im_end|>\\n' }}{% for m in rest %}{% if m.role == 'user' %}"
    "{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}{% elif enable_thinking %}"
    "{{ '<|im_start|>assistant\\n' + m.content.lstrip('\\n') + '<|im_end|>\\n' }}{% else %}"
    "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' + m.content.lstrip('\\n') + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{{ '' if enable_thinking else '<think>\\n\\n</think>\\n' }}"
    "{% endif %}"
)
_GPT_OSS = (
    "{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% else %}"
    "{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
_PHI3 = turns(
    "<|user|>\n@<|end|>\n",
    "<|assistant|>\n@<|end|>\n",
    "<|assistant|>\n",
    "<|system|>\n@<|end|>\n",
    end="<|endoftext|>",
)
_GEMMA = turns(
    "<start_of_turn>user\n~<end_of_turn>\n", "<start_of_turn>model\n~<end_of_turn>\n", "<start_of_turn>model\n"
)
_ZEPHYR = turns("<|user|>\n@</s>\n", "<|assistant|>\n@</s>\n", "<|assistant|>\n", "<|system|>\n@</s>\n")
_OPENCHAT = turns(
    "GPT4 Correct User: @<|end_of_turn|>", "GPT4 Correct Assistant: @<|end_of_turn|>", "GPT4 Correct Assistant:"
)
_GLM4 = turns("<|user|>\n@", "<|assistant|>\n@", "<|assistant|>", "<|system|>\n@", "[gMASK]<sop>")
PUBLISHED = {
    "ChatML": Format(_chatml(), IM, f"@{IM}"),
    "Qwen2.5": Format(CHATML, IM, f"@{IM}"),
    "Qwen3": Format(
        _QWEN3.replace("OPEN", _NO_THOUGHTS), IM, f"@{IM}", f"<think>\n\n</think>\n\n@{IM}", stripped="last line"
    ),
    "Qwen3-2507-Thinking": Format(
        _QWEN3.replace("OPEN", "{{ '<think>\\n' }}"), IM, f"@{IM}", f"\n</think>\n\n@{IM}", stripped="last line"
    ),
    "QwQ": Format(
        _chatml(opened="<think>\n").replace("m.content", "m.content.split('</think>')[-1].lstrip('\\n')"),
        IM,
        f"@{IM}",
        stripped="lines",
    ),
    "DeepSeek-R1": Format(_DEEPSEEK.replace("OPEN", ""), _SENTENCE, f"@{_SENTENCE}"),
    "DeepSeek-R1-Distill": Format(_DEEPSEEK.replace("OPEN", "<think>\\n"), _SENTENCE, f"@{_SENTENCE}"),
    "Phi-3": Format(_PHI3, "<|endoftext|>", "@<|end|>", "@<|end|>\n<|endoftext|>"),
    "Llama-2": Format(_LLAMA2, "</s>", " @ </s>", stripped=True),
    "Llama-3": Format(
        turns(*(f"{head}~<|eot_id|>" for head in _LLAMA3[:2]), _LLAMA3[1], f"{_LLAMA3[2]}~<|eot_id|>", "<s>"),
        "<|eot_id|>",
        "@<|eot_id|>",
        stripped=True,
    ),
    "Gemma": Format(_GEMMA, "<eos>", "@<end_of_turn>", stripped=True, system=False),
    "Gemma-3": Format(_GEMMA3, "<eos>", "@<end_of_turn>", stripped=True),
    "Mistral-v0.1": Format(turns("[INST] @ [/INST]", "@</s>", begin="<s>"), "</s>", "@</s>", system=False),
    "Mistral-v0.3": Format(_MISTRAL3, "</s>", " @</s>", stripped=True),
    "Falcon": Format(_FALCON, "<|endoftext|>", " @", stripped=True),
    "ChatQA": Format(
        turns("\n\nUser: ~", "\n\nAssistant: ~", "\n\nAssistant:\n", "System: ~"), "</s>", "@", stripped=True
    ),
    "Vicuna": Format(turns("USER: ~\n", "ASSISTANT: ~</s>\n", "ASSISTANT:", "~\n\n"), "</s>", " @</s>", stripped=True),
    "Zephyr": Format(_ZEPHYR, "</s>", "@</s>"),
    "SmolLM3": Format(_SMOLLM3, IM, f"@{IM}", stripped="lines"),
    "Command-A": Format(  # which always opens an answer
        turns(
            *(f"{head}@{_END_OF_TURN}" for head in _COHERE[:2]),
            _COHERE[1],
            f"{_COHERE[2]}@{_END_OF_TURN}",
            end=_COHERE[1],
        ),
        _END_OF_TURN,
        f"@{_END_OF_TURN}",
    ),
    "OLMo-2": Format(_OLMO2, "<|endoftext|>", "@<|endoftext|>"),
    "OpenChat": Format(_OPENCHAT, "<|end_of_turn|>", " @<|end_of_turn|>", system=False),
    "GLM-4": Format(_GLM4, "<|endoftext|>", "\n@"),
    "gpt-oss": Format(_GPT_OSS, "<|return|>", "<|channel|>final<|message|>@", "<|channel|>final<|message|>@<|return|>"),
}


@cache
def published(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with a format's template and special tokens."""
    form = PUBLISHED[name]
    tokenizer = byte_level(form.template)
    tokenizer.add_special_tokens({"eos_token": form.eos})
    tokenizer.add_tokens([IM, "<|im_start|>", "<|end|>", "<|user|>", "<|assistant|>", *_SPECIAL], special_tokens=True)
    return tokenizer


_SPECIAL = [
    "<|eot_id|>",
    "<end_of_turn>",
    "<start_of_turn>",
    _wide("<|User|>"),
    _wide("<|Assistant|>"),
    "<|start|>",
    *_COHERE,
]
