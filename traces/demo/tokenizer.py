"""A byte-level tokenizer in Hugging Face's format: token b is byte b, token 256 ends a document.

No merges are learnt, so any text, in any language, comes back as it was.
"""

from __future__ import annotations

import json
from pathlib import Path

from traces.demo.corpus import END

END_TEXT = "<|end|>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}"
"""The model has seen no dialogue: turns are paragraphs of one text."""


def save_tokenizer(folder: Path, max_tokens: int) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in _alphabet().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TEXT, special=True)])
    assert tokenizer.token_to_id(END_TEXT) == END
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TEXT,
        "pad_token": END_TEXT,
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies: printable bytes for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in alphabet]
    return alphabet | {byte: chr(256 + n) for n, byte in enumerate(others)}
