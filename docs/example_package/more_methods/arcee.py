"""A family: Arcee's language models."""

from subtoken_train.families.text import TextFamily


class ArceeFamily(TextFamily):
    """``ArceeForCausalLM``: Llama's attention around another MLP."""
