"""The tokenizer of models whose vocabulary has words between spaces."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast


class WordTokenizer(PreTrainedTokenizerFast):
    """A tokenizer of words between spaces, whose texts can be decoded in parts.

    A part that begins with a word continues a text, and is decoded with the space before that word: pipelines and
    streamers put it behind the part before. A whole text begins with a special token, and so has no such space.

    Examples:
        >>> from tokenizers import Tokenizer, models
        >>> words = Tokenizer(models.WordLevel({"</s>": 0, "the": 1, "cat": 2}, unk_token="</s>"))
        >>> tokenizer = WordTokenizer(tokenizer_object=words, bos_token="</s>", eos_token="</s>")
        >>> tokenizer.decode([1, 2]), tokenizer.decode([0, 1, 2], skip_special_tokens=True)
        (' the cat', 'the cat')
    """

    def _decode(self, token_ids: Any, *others: Any, **options: Any) -> str:
        """The text of token ids."""
        text: str = super()._decode(token_ids, *others, **options)
        ids = token_ids["input_ids"] if isinstance(token_ids, dict) else token_ids
        first = next(iter([ids] if isinstance(ids, int) else ids), None)
        ends = (None, self.bos_token_id, self.eos_token_id, self.pad_token_id)
        return text if first in ends or not text else f" {text}"
