"""Perplexity: each token predicted once, from what lies before it, in bounded memory."""

import math
import tracemalloc
from collections.abc import Iterator

import pytest
import torch

from spesd.config import DataConfig, ModelConfig, SourceConfig
from spesd.data.tokenizer import ByteTokenizer
from spesd.model.transformer import MoETransformer
from spesd.train import perplexity
from spesd.train.perplexity import Tally, Window, measure, score, weighted_mean

WORDS = ByteTokenizer()
TEXTS = ["To be, or not to be: that is the question.", "é", "Whether 'tis nobler in the mind " * 9]


@pytest.fixture(scope="module")
def model() -> MoETransformer:
    torch.set_num_threads(1)
    model = MoETransformer(ModelConfig(vocab_size=264, d_model=32, init_std=0.3))
    model.init_weights(0)
    return model


def logprobs(model: MoETransformer, ids: list[int]) -> torch.Tensor:
    """The log-probability of each id after the first, in one plain pass."""
    with torch.no_grad():
        table = model(torch.tensor([ids[:-1]])).logits_BTV[0].log_softmax(-1)
    return table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def joined() -> list[int]:
    ids = [WORDS.eos_id]
    for text in TEXTS:
        ids += [*WORDS.encode(text), WORDS.eos_id]
    return ids


@pytest.mark.parametrize("context", [1, 7, 64, 10_000])
@pytest.mark.parametrize("batch", [1, 50, 8192])
def test_every_token_is_a_target_once_whatever_the_context(
    model: MoETransformer, context: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "BATCH_TOKENS", batch)
    monkeypatch.setattr(perplexity, "PIECE", 5)
    ids = joined()
    expected = 0.0
    for at in range(0, len(ids) - 1, context):
        expected -= float(logprobs(model, ids[at : at + context + 1]).sum())
    tally = measure(model, WORDS, TEXTS, context=context)
    assert tally.tokens == len(ids) - 1
    assert tally.bytes == sum(len(text.encode()) for text in TEXTS)
    assert tally.nats == pytest.approx(expected, rel=1e-5)
    counts = tally.to_json()
    assert counts["nats_per_token"] == pytest.approx(expected / (len(ids) - 1), rel=1e-5)
    assert counts["perplexity"] == pytest.approx(math.exp(expected / (len(ids) - 1)), rel=1e-4)
    assert counts["bits_per_byte"] == pytest.approx(expected / math.log(2) / tally.bytes, rel=1e-5)


def test_max_tokens_ends_in_the_middle_of_a_document(model: MoETransformer) -> None:
    tally = measure(model, WORDS, TEXTS, context=16, max_tokens=20)
    assert (tally.tokens, tally.bytes) == (20, pytest.approx(20 * 42 / 43))
    ids = joined()[:21]
    expected = -float(logprobs(model, ids[:17]).sum() + logprobs(model, ids[16:]).sum())
    assert tally.nats == pytest.approx(expected, rel=1e-5)
    assert measure(model, WORDS, TEXTS, context=16, max_tokens=10**6).tokens == len(joined()) - 1


def test_no_text_has_no_perplexity(model: MoETransformer) -> None:
    counts = measure(model, WORDS, [], context=16).to_json()
    assert counts["tokens"] == 0
    assert counts["nats_per_token"] is counts["perplexity"] is counts["bits_per_byte"] is None
    assert Tally(tokens=1, bytes=1, nats=1e6).to_json()["perplexity"] is None  # no infinity in JSON


def test_text_is_streamed(model: MoETransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "_score_batch", lambda model, windows: [])
    read = 0

    def documents() -> Iterator[str]:
        nonlocal read
        for _ in range(200):
            read += 1
            yield "x" * 10_000

    tracemalloc.start()
    measure(model, WORDS, documents(), context=128)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read == 200
    assert peak < 1_500_000  # 2,000,000 tokens would be 16 MB of references alone
    read = 0
    measure(model, WORDS, documents(), context=128, max_tokens=25_000)
    assert read == 3


def test_a_continuation_is_scored_from_its_context(model: MoETransformer) -> None:
    before, after = WORDS.encode("To be, or"), WORDS.encode(" not")
    each = logprobs(model, before + after)[-len(after) :]
    wanted = [Window(before + after, len(before)), Window([256, *after], 1)]
    scores = score(model, wanted, 64)
    assert scores[0].logprob == pytest.approx(float(each.sum()), rel=1e-5)
    assert scores[1].logprob == pytest.approx(float(logprobs(model, [256, *after]).sum()), rel=1e-5)
    short = score(model, wanted[:1], 6)[0]  # a context too long loses its beginning
    crop = (before + after)[-7:]
    assert short.logprob == pytest.approx(float(logprobs(model, crop)[-4:].sum()), rel=1e-5)


def test_a_continuation_longer_than_the_context_is_scored_whole(model: MoETransformer) -> None:
    ids = [256, *WORDS.encode("Whether 'tis nobler")]
    expected = logprobs(model, ids[:9]).sum() + logprobs(model, ids[8:17]).sum()
    expected += logprobs(model, ids[-9:])[-(len(ids) - 17) :].sum()
    assert score(model, [Window(ids, 1)], 8)[0].logprob == pytest.approx(float(expected), rel=1e-5)


def test_greedy_tells_whether_each_token_is_the_likeliest(model: MoETransformer) -> None:
    with torch.no_grad():
        likeliest = int(model(torch.tensor([[1, 2, 3]])).logits_BTV[0, -1].argmax())
    other = (likeliest + 1) % 200
    scores = score(
        model, [Window([1, 2, 3, likeliest], 3), Window([1, 2, 3, other], 3), Window([1, 2], 2)], 8
    )
    assert [s.greedy for s in scores] == [True, False, True]
    assert scores[2].logprob == 0.0  # nothing was to be predicted


def test_the_mean_over_sources_follows_their_weights() -> None:
    sources = tuple(
        SourceConfig(name=name, weight=weight) for name, weight in [("a", 3.0), ("b", 0.7)]
    )
    config = DataConfig(sources=sources)
    assert weighted_mean({"a": 1.0, "b": 2.0}, config) == pytest.approx((3.0 + 1.4) / 3.7)
    assert weighted_mean({"b": 1.1}, config) == 1.1  # to the last bit: a has nothing held out
