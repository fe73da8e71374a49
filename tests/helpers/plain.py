"""Plain training, written independently of the trainer: what a swarm of one must equal."""

import math

import torch

from spesd.config import RunConfig
from spesd.data.stream import TextStream
from spesd.data.tokenizer import ByteTokenizer
from spesd.model.transformer import MoETransformer


def plain_loop(config: RunConfig, peer: str, steps: int) -> dict[str, torch.Tensor]:
    """Training as anybody would write it, without a line of the trainer's."""
    model = MoETransformer(config.model)
    model.init_weights(config.seed)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    o, s = config.optimizer, config.schedule
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": o.weight_decay},
         {"params": gains, "weight_decay": 0.0}],
        lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=True,
    )  # fmt: skip
    stream = TextStream(config.data, ByteTokenizer(), seed=config.seed, peer_id=peer)
    seen = 0
    for _ in range(steps):
        inputs, targets = stream.next_batch()
        loss = model.loss(torch.from_numpy(inputs), torch.from_numpy(targets), config.loss)
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.grad_clip)
        seen += inputs.size
        if seen < s.warmup_tokens:
            lr = o.lr * seen / s.warmup_tokens
        else:
            past = min(1.0, (seen - s.warmup_tokens) / (s.total_tokens - s.warmup_tokens))
            left = 0.5 * (1.0 + math.cos(math.pi * past))
            lr = o.lr * (s.final_fraction + (1.0 - s.final_fraction) * left)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        adam.zero_grad(set_to_none=True)
    return {n: p.detach().clone() for n, p in model.named_parameters()}
