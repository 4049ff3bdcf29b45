"""A tokenizer with a vocabulary of a few words, created without a download."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

SPECIAL = {"unk_token": "<unk>", "eos_token": "<eos>", "pad_token": "<pad>"}
WORDS = ["<pad>", "<eos>", "<user>", "<assistant>", "2", "3", "+", "=", "4", "5", "6", "<unk>"]
_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} "
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tokenizer(template: str = _TEMPLATE) -> Any:
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    words = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    words.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL)
    made.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    made.chat_template = template
    return made


def ids(text: str) -> list[int]:
    """Return the token ids of words that are separated by spaces."""
    return [WORDS.index(word) for word in text.split()]
