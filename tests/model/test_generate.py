"""Drawing tokens."""

import pytest
import torch

from spesd.config import ModelConfig
from spesd.model.generate import Sampling, draw, generate
from spesd.model.transformer import MoETransformer


@pytest.fixture(scope="module")
def model():
    model = MoETransformer(ModelConfig(vocab_size=31, init_std=0.3))
    model.init_weights(0)
    return model


def test_greedy_takes_the_likeliest_token_of_the_whole_context(model):
    out = list(generate(model, [1, 2, 3], 5, Sampling(temperature=0)))
    context = [1, 2, 3]
    for token in out:
        with torch.no_grad():
            assert token == int(model(torch.tensor([context])).logits_BTV[0, -1].argmax())
        context.append(token)
    assert len(out) == 5


def test_the_seed_decides_the_text(model):
    texts = [
        list(generate(model, [1], 20, Sampling(), torch.Generator().manual_seed(seed)))
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_it_stops_before_the_end_token(model):
    free = list(generate(model, [4], 8, Sampling(temperature=0)))
    stop = Sampling(temperature=0, eos_id=free[3])
    assert list(generate(model, [4], 8, stop)) == free[: free.index(free[3])]


def test_the_context_is_cropped(model):
    crop = Sampling(temperature=0, max_context=4)
    a = next(generate(model, [9, 9, 9, 1, 2, 3, 4], 1, crop))
    assert a == next(generate(model, [1, 2, 3, 4], 1, Sampling(temperature=0)))
    with pytest.raises(ValueError, match="nothing to continue"):
        next(generate(model, [], 1, crop))


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    generator = torch.Generator().manual_seed(0)

    def drawn(top_p, temperature=1.0):
        sampling = Sampling(top_p=top_p, temperature=temperature)
        return {draw(logits, sampling, generator) for _ in range(300)}

    assert drawn(0.4) == {1}
    assert drawn(0.6) == {1, 3}
    assert drawn(0.8) == {1, 2, 3}
    assert drawn(1.0) == {0, 1, 2, 3}
    assert drawn(0.6, temperature=0.1) == {1}


def test_draws_follow_the_probabilities():
    logits = torch.tensor([0.2, 0.8]).log()
    generator = torch.Generator().manual_seed(0)
    ones = sum(draw(logits, Sampling(), generator) for _ in range(2000))
    assert 0.77 < ones / 2000 < 0.83


def test_top_p_0_takes_the_likeliest_and_1_keeps_every_token():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    generator = torch.Generator().manual_seed(0)
    assert {draw(logits, Sampling(top_p=0.0), generator) for _ in range(100)} == {1}
    even = torch.zeros(50)  # rounding in the sum must not cut the last token off
    assert {draw(even, Sampling(top_p=1.0), generator) for _ in range(3000)} == set(range(50))


def test_temperature_0_needs_no_generator_and_a_high_one_evens_out():
    logits = torch.tensor([0.0, 3.0, 1.0])
    assert draw(logits, Sampling(temperature=0, top_p=0.5), None) == 1
    generator = torch.Generator().manual_seed(0)
    hot = [draw(logits, Sampling(temperature=10.0), generator) for _ in range(3000)]
    assert all(0.2 < hot.count(token) / 3000 < 0.5 for token in range(3))
    cold = [draw(logits, Sampling(temperature=0.05), generator) for _ in range(300)]
    assert set(cold) == {1}
    assert draw(logits, Sampling(temperature=1e-300), generator) == 1  # logits overflow, not us


def test_a_prompt_longer_than_the_context_goes_on_to_the_end(model):
    crop = Sampling(temperature=0, max_context=4)
    prompt = [n % 31 for n in range(40)]
    out = list(generate(model, prompt, 6, crop))
    context = list(prompt)
    for token in out:
        with torch.no_grad():
            window = torch.tensor([context[-4:]])
            assert token == int(model(window).logits_BTV[0, -1].argmax())
        context.append(token)
    assert len(out) == 6


def test_the_end_token_in_the_prompt_does_not_end_the_text(model):
    first = next(generate(model, [4], 1, Sampling(temperature=0)))
    stop = Sampling(temperature=0, eos_id=first)
    assert list(generate(model, [4], 8, stop)) == []
    other = Sampling(temperature=0, eos_id=5)
    free = list(generate(model, [5, 4], 8, Sampling(temperature=0)))
    cut = free[: free.index(5)] if 5 in free else free
    assert list(generate(model, [5, 4], 8, other)) == cut
