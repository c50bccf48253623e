"""A tokenizer of bytes with the special tokens of many chat formats, and templates as they are published."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<image>", "<video>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"]
SPECIAL += ["<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<IMG_CONTEXT>", "<img>", "</img>"]


def byte_tokenizer(special: Sequence[str], size: int, text: str, **named: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    known = {"special_tokens": list(special), "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    tokenizer.train_from_iterator([text] * 50, trainers.BpeTrainer(vocab_size=size, show_progress=False, **known))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def byte_level(template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with all marks of all families as special tokens, and a chat template."""
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    text = "USER: what is <image> in a file ? ASSISTANT: a tag"
    return byte_tokenizer(SPECIAL, 400, text, additional_special_tokens=SPECIAL[3:], **named)


CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As SmolLM2's and Qwen2.5's: a system text of its own where none is given."""
MARKED = CHATML.replace(
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}",
    "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}",
)
"""The same with marks around what assistants say."""
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
"""A space before each answer, no opening of one, no system."""
MISTRAL = (
    "{{ bos_token }}{% set told = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (told + '\\n\\n' if loop.last and told else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
"""The system's text stands in the last turn."""
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
"""A text that is not to be answered ends beside its last turn."""
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content.split('</think>')[-1] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Qwen3's: the last answer begins otherwise than earlier ones, whose thoughts are left out."""


class Format(NamedTuple):
    """A format; ``learnt`` of an answer that others follow, ``last`` of the last one ("": the same).

    ``stripped``: white space around an answer goes; "lines": line breaks before it alone; "last line": of the last one.
    """

    template: str
    eos: str
    learnt: str
    last: str = ""
    stripped: bool | str = False


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
    "<|user|>\n@<|end|>\n", "<|assistant|>\n@<|end|>\n", "<|assistant|>\n", "<|system|>\n@<|end|>\n",
    end="<|endoftext|>",
)  # fmt: skip
_ZEPHYR = turns("<|user|>\n@</s>\n", "<|assistant|>\n@</s>\n", "<|assistant|>\n", "<|system|>\n@</s>\n")
_GLM4 = turns("<|user|>\n@", "<|assistant|>\n@", "<|assistant|>", "<|system|>\n@", "[gMASK]<sop>")
PUBLISHED = {
    "ChatML": Format(_chatml(), IM, f"@{IM}"), "Qwen2.5": Format(CHATML, IM, f"@{IM}"),
    "Qwen3": Format(
        _QWEN3.replace("OPEN", _NO_THOUGHTS), IM, f"@{IM}", f"<think>\n\n</think>\n\n@{IM}", stripped="last line"
    ),
    "Qwen3-2507-Thinking": Format(
        _QWEN3.replace("OPEN", "{{ '<think>\\n' }}"), IM, f"@{IM}", f"\n</think>\n\n@{IM}", stripped="last line"
    ),
    "QwQ": Format(
        _chatml(opened="<think>\n").replace("m.content", "m.content.split('</think>')[-1].lstrip('\\n')"), IM, f"@{IM}",
        stripped="lines",
    ),
    "DeepSeek-R1": Format(_DEEPSEEK.replace("OPEN", ""), _SENTENCE, f"@{_SENTENCE}"),
    "DeepSeek-R1-Distill": Format(_DEEPSEEK.replace("OPEN", "<think>\\n"), _SENTENCE, f"@{_SENTENCE}"),
    "Phi-3": Format(_PHI3, "<|endoftext|>", "@<|end|>", "@<|end|>\n<|endoftext|>"),
    "Llama-2": Format(_LLAMA2, "</s>", " @ </s>", stripped=True),
    "Llama-3": Format(
        turns(*(f"{head}~<|eot_id|>" for head in _LLAMA3[:2]), _LLAMA3[1], f"{_LLAMA3[2]}~<|eot_id|>", "<s>"),
        "<|eot_id|>", "@<|eot_id|>", stripped=True,
    ),
    "Gemma-3": Format(_GEMMA3, "<eos>", "@<end_of_turn>", stripped=True),
    "Mistral-v0.3": Format(_MISTRAL3, "</s>", " @</s>", stripped=True),
    "Falcon": Format(_FALCON, "<|endoftext|>", " @", stripped=True),
    "ChatQA": Format(
        turns("\n\nUser: ~", "\n\nAssistant: ~", "\n\nAssistant:\n", "System: ~"), "</s>", "@", stripped=True
    ),
    "Zephyr": Format(_ZEPHYR, "</s>", "@</s>"), "SmolLM3": Format(_SMOLLM3, IM, f"@{IM}", stripped="lines"),
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
    "GLM-4": Format(_GLM4, "<|endoftext|>", "\n@"),
    "gpt-oss": Format(_GPT_OSS, "<|return|>", "<|channel|>final<|message|>@", "<|channel|>final<|message|>@<|return|>"),
}  # fmt: skip


@cache
def published(name: str) -> PreTrainedTokenizerFast:
    form = PUBLISHED[name]
    tokenizer = byte_level(form.template)
    tokenizer.add_special_tokens({"eos_token": form.eos})
    tokenizer.add_tokens([IM, "<|im_start|>", "<|end|>", "<|user|>", "<|assistant|>", *_SPECIAL], special_tokens=True)
    return tokenizer


_SPECIAL = [
    "<|eot_id|>", "<end_of_turn>", "<start_of_turn>", _wide("<|User|>"), _wide("<|Assistant|>"), "<|start|>", *_COHERE,
]  # fmt: skip
