"""The embedded language model's architecture and tokenizer, from configuration and the embedded English alone.

A genuine ``LlamaForCausalLM`` with grouped queries (4 query heads, 2 key-value heads of 32, so d_v = 64) and a
byte-level BPE of the embedded English in which every name and code word of the recall facts is one token.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from subtoken_train.datasets.english import documents
from subtoken_train.datasets.recall import ADJECTIVES, NAMES, NOUNS

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
VOCABULARY = 1280
WIDTH, HEADS, KV_HEADS, LAYERS, MAX_LENGTH = 128, 4, 2, 6, 1024
_WORD_WEIGHT = 2000  # repeats of the recall words: more than any English pair has, so that they are merged first


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the training split; prompts start with ``<s>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    words = "".join(f" {word}" for word in (*NAMES, *ADJECTIVES, *NOUNS))
    tokenizer.train_from_iterator([*documents("train"), *[words] * _WORD_WEIGHT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", SPECIAL_TOKENS.index("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side="left",
        model_max_length=MAX_LENGTH,
    )


def build_model(layers: int = LAYERS) -> LlamaForCausalLM:
    """The randomly initialised model; seed torch before calling."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=MAX_LENGTH,
            pad_token_id=SPECIAL_TOKENS.index("<pad>"),
            bos_token_id=SPECIAL_TOKENS.index("<s>"),
            eos_token_id=SPECIAL_TOKENS.index("</s>"),
            tie_word_embeddings=False,
        )
    )
