"""The byte tokenizer as a Hugging Face tokenizer.json, for exports.

Decides that file's bytes. The ids are those of `tokenizer.ByteTokenizer`: a vocabulary of the 256
bytes, no merges, and the end of a document.
"""

import json
from typing import Any

END = "<|endoftext|>"


def byte_characters() -> list[str]:
    """Return the printable character by which byte-level vocabularies write each byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def byte_tokenizer_json() -> bytes:
    """Return the file; the same bytes each time, by which an import knows it again."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,  # a text is one word: there are no merges that could cross a space
    }
    tree: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 256,
                "content": END,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(byte_characters())},
            "merges": [],
        },
    }
    return (json.dumps(tree, indent=1, ensure_ascii=False) + "\n").encode()
