"""What tokenizer files ask for that a data stream must not do, and how they are named."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from spesd.config import TokenizerConfig
from spesd.data.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer, tokenizer_digest
from spesd.errors import ConfigError, Unavailable


@pytest.fixture
def fast() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["to be or not to be " * 20], trainer)
    return tokenizer


def saved(tokenizer: Tokenizer, folder: Path) -> Path:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_documents_are_neither_cut_nor_filled_up(fast: Tokenizer, tmp_path: Path) -> None:
    fast.enable_truncation(8)
    fast.enable_padding(length=8)
    tokenizer = FileTokenizer(saved(fast, tmp_path))
    text = "to be or not to be " * 50
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("t")) == 1


def test_the_vocabulary_reaches_to_the_largest_id(fast: Tokenizer, tmp_path: Path) -> None:
    path = saved(fast, tmp_path)
    tree = json.loads(path.read_text())
    last = max(tree["model"]["vocab"], key=tree["model"]["vocab"].get)
    tree["model"]["vocab"][last] = 1000  # a gap: the number of ids stays, the largest grows
    path.write_text(json.dumps(tree))
    size = fast.get_vocab_size()
    assert FileTokenizer(path).vocab_size == 1001
    with pytest.raises(ConfigError, match=r"model\.vocab_size.*tokenizer\.path"):
        load_tokenizer(TokenizerConfig(kind="file", path="x"), path, size)


def test_half_a_surrogate_pair_is_encoded(fast: Tokenizer, tmp_path: Path) -> None:
    tokenizer = FileTokenizer(saved(fast, tmp_path))
    assert tokenizer.decode(tokenizer.encode("a\ud800b ö")) == "a?b ö"


def test_a_batch_is_its_texts_one_by_one(fast: Tokenizer, tmp_path: Path) -> None:
    texts = ["to be", "", "or not ö", "\ud800"]
    for tokenizer in (FileTokenizer(saved(fast, tmp_path)), ByteTokenizer()):
        assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_the_digest_names_the_bytes(fast: Tokenizer, tmp_path: Path) -> None:
    path = saved(fast, tmp_path)
    before = FileTokenizer(path).digest
    assert before == tokenizer_digest(path)
    path.write_text(path.read_text() + "\n")
    assert tokenizer_digest(path) != before
    with pytest.raises(Unavailable, match="cannot be read"):
        tokenizer_digest(tmp_path / "none.json")
