"""A tokenizer of bytes with the special tokens of many chat formats, and templates as they are published."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<image>", "<video>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"]
SPECIAL += ["<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<IMG_CONTEXT>", "<img>", "</img>"]


def byte_level(template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with all marks of all families as special tokens, and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=SPECIAL, initial_alphabet=sorted(alphabet)
    )
    tokenizer.train_from_iterator(["USER: what is <image> in a file ? ASSISTANT: a tag"] * 50, trainer)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    more = {"additional_special_tokens": SPECIAL[3:], "chat_template": template}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **more, **special)


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
