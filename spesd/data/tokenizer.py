"""Text to token ids and back: bytes as they are, or any tokenizer.json by its file.

Decides whether a tokenizer fits a run. Never downloads anything.
"""

from pathlib import Path
from typing import Protocol

from spesd.config import TokenizerConfig
from spesd.digest import file_digest
from spesd.errors import ConfigError, Unavailable

_END_WORDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]")
_PAD_WORDS = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>")


class Tokenizer(Protocol):
    """What the data stream needs of a tokenizer."""

    vocab_size: int  # one more than the largest id
    eos_id: int  # ends a document
    digest: str  # two tokenizers of one digest give the same ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without an end."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of several texts."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; what is no text becomes a replacement character."""


class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255; 256 ends a document."""

    vocab_size = 257
    eos_id = 256
    digest = "bytes"

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode("utf-8", "replace"))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the bytes of several texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """Return the text; half a character becomes a replacement character."""
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


class FileTokenizer:
    """A Hugging Face tokenizer.json."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        try:
            self._fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises bare exceptions
            if not path.is_file():
                raise Unavailable(
                    f"there is no tokenizer file {path}; give its path in run.toml or peer.toml."
                ) from None
            first = (str(error).splitlines() or [type(error).__name__])[0][:120]
            raise ConfigError(f"{path} is not a tokenizer.json ({first}).") from None
        # many files ask for both, for models of a fixed length: documents would be cut or filled up
        self._fast.no_truncation()
        self._fast.no_padding()
        self.digest = tokenizer_digest(path)
        # ids may have gaps, so their number would not do
        self.vocab_size = 1 + max(self._fast.get_vocab(with_added_tokens=True).values(), default=-1)
        ends = [self._fast.token_to_id(word) for word in _END_WORDS]
        known = [i for i in ends if i is not None]
        if not known:
            raise ConfigError(
                f"{path} has no token that ends a document (one of {', '.join(_END_WORDS)}); add "
                "one to its vocabulary."
            )
        self.eos_id = int(known[0])

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return list(self._fast.encode(_encodable(text), add_special_tokens=False).ids)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of several texts, without special tokens."""
        clean = [_encodable(text) for text in texts]
        return [list(e.ids) for e in self._fast.encode_batch(clean, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""
        return str(self._fast.decode(ids))

    def word(self, token: int) -> str | None:
        """Return how the vocabulary writes a token; None if there is none with this id."""
        word = self._fast.id_to_token(token)
        return None if word is None else str(word)

    def padding(self) -> tuple[str | None, int | None]:
        """Return the token that is there to fill up rows, and its id; (None, None) without one."""
        for word in _PAD_WORDS:
            if (token := self._fast.token_to_id(word)) is not None:
                return word, int(token)
        return None, None


def _encodable(text: str) -> str:
    """Replace half surrogate pairs, which the library refuses."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def tokenizer_digest(path: Path) -> str:
    """Return the name of a tokenizer file's bytes, by which joiners also fetch it."""
    try:
        return file_digest(path)
    except OSError as error:
        raise Unavailable(f"{path} cannot be read: {error.strerror}.") from None


def load_tokenizer(config: TokenizerConfig, path: Path | None, vocab_size: int) -> Tokenizer:
    """Return the run's tokenizer, checked against its digest and the model's vocabulary.

    `path` is where this machine has the file. Raises Unavailable if it is not there, ConfigError if
    it is another one, no tokenizer at all, or too large for `model.vocab_size`.
    """
    tokenizer: Tokenizer
    if config.kind == "bytes":
        tokenizer = ByteTokenizer()
    else:
        given = path or Path(config.path)
        tokenizer = FileTokenizer(given)
        wanted = config.digest.split(":")[0]  # a size follows
        if wanted and tokenizer.digest != wanted:
            raise ConfigError(
                f"{given} is not the run's tokenizer: its bytes differ from tokenizer.digest."
            )
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but model.vocab_size is "
            f"{vocab_size}; raise model.vocab_size, or choose another by tokenizer.kind and "
            "tokenizer.path."
        )
    return tokenizer
