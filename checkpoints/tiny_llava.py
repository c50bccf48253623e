"""The embedded VLM's architecture and processor, from configuration alone.

A genuine ``LlavaForConditionalGeneration`` (CLIP vision tower, two-layer projector, Llama) of about 2 M parameters:
96 x 96 images in patches of 12 pixels give 64 visual tokens, so that 25, 15.625, 12.5 and 7.8125 % of them are whole
numbers (16, 10, 8 and 5).
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from subtoken_train.datasets.scenes import COLOR_NAMES, IMAGE_SIZE, OPTION_LETTERS, PLACES

PATCH = 12
VISUAL_TOKENS = (IMAGE_SIZE // PATCH) ** 2
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "<image>")
WIDTH, HEADS, VISION_LAYERS, TEXT_LAYERS = 128, 4, 4, 6
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}USER: "
    "{% for part in message['content'] if part['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }} {% endfor %}"
    "{% else %}ASSISTANT: "
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}</s>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level tokenizer over the scenes' closed vocabulary; unknown words become ``<unk>``."""
    said = [
        "USER:",
        "ASSISTANT:",
        "?",
        ".",
        "what",
        "where",
        "which",
        "is",
        "at",
        "there",
        "a",
        "the",
        "how",
        "many",
        "describe",
        "list",
        "none",
        "yes",
        "no",
        "color",
    ]
    known = (*SPECIAL_TOKENS, *said, *OPTION_LETTERS, *map(str, range(10)), *COLOR_NAMES, *PLACES)
    words = {word: index for index, word in enumerate(known)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
        padding_side="left",
        model_max_length=512,
    )


def build_processor() -> LlavaProcessor:
    """The LLaVA processor (PIL backend) whose text side starts every prompt with ``<s>``."""
    image_processor = CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE_SIZE},
        crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return LlavaProcessor(
        image_processor,
        build_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template="<s>" + CHAT_TEMPLATE,
    )


def build_model(text_layers: int = TEXT_LAYERS) -> LlavaForConditionalGeneration:
    """The randomly initialised model; seed torch before calling."""
    tokenizer = build_tokenizer()
    image_token = int(tokenizer.convert_tokens_to_ids("<image>"))
    vision = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=VISION_LAYERS,
        num_attention_heads=HEADS,
        image_size=IMAGE_SIZE,
        patch_size=PATCH,
        projection_dim=WIDTH,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=text_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image_token,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    return LlavaForConditionalGeneration(config)
