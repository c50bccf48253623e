"""The embedded language model's architecture and tokenizer, from configuration and the embedded English alone.

A genuine ``LlamaForCausalLM`` with grouped queries (4 query heads, 2 key-value heads of 32, so d_v = 64) and a
byte-level BPE of the embedded English in which every name and code word of the recall facts is one token.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from subtoken_train.datasets.english import documents
from subtoken_train.datasets.recall import ADJECTIVES, NAMES, NOUNS

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
VOCABULARY = 1280
WIDTH, HEADS, KV_HEADS, LAYERS, MAX_LENGTH = 128, 4, 2, 4, 1024
INITIAL_SCALE = 0.08  # about 1/sqrt(WIDTH): with the usual 0.02 attention starts flat and recall is learned far later
_CONSTANT, _CONSTANT_NORMED = 0.9, 8.0  # the first coordinate of an embedding, and what the norm makes of it
_SHARPNESS = 8.0  # amplitude of the head that reads the previous token
_WRITTEN = 0.1  # scale of what attention and MLP add to the stream, before training
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
    """The model before training; seed torch before calling.

    Random, but what layers write starts small, so that later ones still see which token they stand on, and one head of
    the first layer reads the previous token: recall needs such a head (the entry after a name is found by the name
    before it), and a random model finds it late, if at all.
    """
    model = LlamaForCausalLM(
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
            initializer_range=INITIAL_SCALE,
            tie_word_embeddings=True,
        )
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(_WRITTEN)
            layer.mlp.down_proj.weight.mul_(_WRITTEN)
        _read_previous_token(model)
    return model


def _read_previous_token(model: LlamaForCausalLM) -> None:
    """Make the first head look one position back, whatever the tokens are.

    Every embedding gets the same number in its first coordinate, the only one that the head's queries and keys read:
    keys are (1, 0) in every rotary pair, queries the same turned back by one position, so that they meet one back.
    """
    head_dim, attention = WIDTH // HEADS, model.model.layers[0].self_attn
    pairs, scale = head_dim // 2, _SHARPNESS / _CONSTANT_NORMED
    angles = model.model.rotary_emb.inv_freq.float()
    model.model.embed_tokens.weight[:, 0] = _CONSTANT
    query, key = attention.q_proj.weight[:head_dim], attention.k_proj.weight[:head_dim]
    query.zero_(), key.zero_()
    key[:pairs, 0] = scale
    query[:pairs, 0], query[pairs:, 0] = scale * angles.cos(), -scale * angles.sin()
