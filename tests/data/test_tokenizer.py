"""Tokenizers: bytes, or a file that must be the run's and fit the vocabulary."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from spesd.config import TokenizerConfig
from spesd.data.tokenizer import ByteTokenizer, load_tokenizer
from spesd.digest import file_digest
from spesd.errors import ConfigError, Unavailable

FILE = TokenizerConfig(kind="file", path="x.json")


def trained(folder: Path, *special: str) -> Path:
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(special), show_progress=False)
    tokenizer.train_from_iterator(["to be or not to be " * 20], trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_bytes_come_back_as_they_were() -> None:
    tokenizer = ByteTokenizer()
    text = "To be, or nöt 🙂"
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eos_id]) == text
    assert max(tokenizer.encode(text)) < 256 < tokenizer.vocab_size


def test_a_file_is_used_and_checked(tmp_path: Path) -> None:
    path = trained(tmp_path, "</s>")
    tokenizer = load_tokenizer(FILE, path, 400)
    assert tokenizer.eos_id == 0 and tokenizer.encode("to be")
    named = TokenizerConfig(kind="file", digest=f"{file_digest(path)}:{path.stat().st_size}")
    assert load_tokenizer(named, path, 400).vocab_size == tokenizer.vocab_size
    with pytest.raises(ConfigError, match=r"model.vocab_size is 5"):
        load_tokenizer(FILE, path, 5)
    path.write_text(path.read_text() + " ")
    with pytest.raises(ConfigError, match="not the run's tokenizer"):
        load_tokenizer(named, path, 400)


def test_wrong_files_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no tokenizer file"):
        load_tokenizer(FILE, tmp_path / "none.json", 400)
    bad = tmp_path / "bad.json"
    bad.write_text('{"model": 1}')
    with pytest.raises(ConfigError, match=r"not a tokenizer.json"):
        load_tokenizer(FILE, bad, 400)
    with pytest.raises(ConfigError, match="ends a document"):
        load_tokenizer(FILE, trained(tmp_path), 400)
    with pytest.raises(ConfigError, match="257"):
        load_tokenizer(TokenizerConfig(), None, 256)
