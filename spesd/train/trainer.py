"""One peer's trainer: the model, its optimizer and its text, in one process and one thread.

Decides how a step, a snapshot, a merge and a checkpoint change the weights. Never talks to
anybody: `child` gives it commands, weights come and go as files.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spesd.checkpoint import bundle as files
from spesd.checkpoint.manifest import Checkpoint, Moments
from spesd.checkpoint.store import Store
from spesd.data.stream import TextStream
from spesd.data.tokenizer import load_tokenizer
from spesd.errors import DamagedState, ProtocolViolation, UsageError
from spesd.ids import SHARED, all_parts, expert_part, part_expert
from spesd.model.loss import LossOutput
from spesd.model.partition import expert_layers, load_part, part_shapes, part_values
from spesd.model.transformer import MoETransformer
from spesd.swarm.records import StatePart
from spesd.train.device import choose_device
from spesd.train.merge import aggregate, check_finite, merge_experts, to_wire, weights
from spesd.train.optimizer import PeerOptimizer
from spesd.train.perplexity import weighted_mean
from spesd.train.protocol import StepResult, TrainerSetup
from spesd.train.schedule import learning_rate, merging_alpha, owned_balance

Versions = Mapping[str, Sequence[int]]  # (round, term) by part
_FROZEN = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


class Trainer:
    """The trainer of one peer."""

    def __init__(self, setup: TrainerSetup) -> None:
        self.setup, self.config = setup, (config := setup.config)
        self.device = choose_device(setup.device)
        self.store = Store(setup.store)
        tokenizer = load_tokenizer(config.tokenizer, setup.tokenizer, config.model.vocab_size)
        self.stream = TextStream(
            config.data, tokenizer, seed=config.seed, peer_id=setup.peer_id, paths=setup.data
        )
        layout = setup.layout
        self.model = MoETransformer(
            config.model, frozen_dtype=_FROZEN[layout.frozen], recompute=layout.recompute
        )
        self.model.to(self.device)
        self.model.set_owned(setup.owned)
        self.optimizer = PeerOptimizer(self.model, config.optimizer, moments8=layout.moments8)
        self.shapes = part_shapes(config.model)
        self.ready = False  # weights are a state of the run, whole
        self.steps = self.tokens = 0
        self.val_loss: float | None = None
        self.val_by_source: dict[str, float] = {}
        self._clean: dict[str, tuple[str, int]] = {}  # parts on disk just as they are here
        self._sent: dict[str, dict[str, Tensor]] = {}
        self.begin_round(0, 0, 1)

    # --- weights in -------------------------------------------------------------------------

    def initialise(self) -> None:
        """Make the model's beginning: the same values on every peer of the run."""
        if self.config.start.kind == "weights":
            raise UsageError("this run starts from weights: load them instead of random ones.")
        self.model.init_weights(self.config.seed)
        self._clean.clear()
        self.ready = True

    def load_checkpoint(self, checkpoint: Checkpoint, owned: Sequence[int] | None = None) -> None:
        """Go on exactly where a checkpoint of ours was made.

        `owned`: to own only these of its experts, where memory has become less.
        """
        for moments in checkpoint.moments:  # verified before anything changes
            files.read_tensors(self.bundle(moments.digest), moments.digest)
        # owned first: experts that are still frozen would be loaded in the precision of the frozen
        wanted = checkpoint.owned if owned is None else owned
        if set(wanted) != self.model.owned:
            self.set_owned(wanted)
        self._load({p.part: (self.bundle(p.digest), p.digest) for p in checkpoint.parts})
        self.ready = False
        for moments in checkpoint.moments:
            if moments.part in self.optimizer.trained_parts:
                tensors = files.read_tensors(self.bundle(moments.digest), None)
                try:
                    self.optimizer.load_state_of(moments.part, tensors)
                except ValueError as error:
                    raise DamagedState(f"the moments of {moments.part}: {error}") from None
        self.stream.load_state_dict(checkpoint.stream)
        self.steps, self.tokens = checkpoint.steps, checkpoint.tokens
        self.ready = True

    def load_state(self, given: Sequence[Mapping[str, Any]]) -> None:
        """Take a whole state from another peer; moments and place in the data stay ours."""
        self._load({p["part"]: (Path(p["path"]), p["digest"]) for p in given})
        # what is held here may be rounded further; others get the very bundles that came
        self._clean = {p["part"]: (p["digest"], Path(p["path"]).stat().st_size) for p in given}

    def _load(self, given: Mapping[str, tuple[Path, str]]) -> None:
        if missing := set(self.shapes) - given.keys():
            raise ProtocolViolation(f"a state lacks {sorted(missing)[0]}")
        for part in sorted(self.shapes):  # verified whole before the first weight changes
            files.read_bundle(given[part][0], self.shapes[part], given[part][1])
        self.ready = False
        for part in sorted(self.shapes):
            load_part(self.model, part, files.read_bundle(given[part][0], self.shapes[part], None))
        self._clean.clear()
        self.ready = True

    def set_owned(self, experts: Sequence[int]) -> None:
        """Own these experts from now on; moments of those that stay are kept."""
        changed = self.model.owned ^ set(experts)
        self.model.set_owned(experts)
        self.optimizer.rebuild()
        for expert in changed:
            self._clean.pop(expert_part(expert), None)

    # --- training ---------------------------------------------------------------------------

    def begin_round(self, number: int, global_tokens: int, contributors: int) -> None:
        """Start counting a round; the schedule follows the swarm's progress."""
        self.round, self.global_tokens = number, global_tokens
        self.contributors = max(contributors, 1)
        self.step_in_round = 0
        self._losses: list[float] = []
        self._trained: Counter[str] = Counter()  # tokens by part

    def progress(self) -> int:
        """The swarm's tokens now, as far as this peer can tell: the others train as fast as we."""
        own = self.step_in_round * self.config.data.tokens_per_step
        return self.global_tokens + own * self.contributors

    def step(self) -> StepResult:
        """Make one optimizer step on the next batch; a step that is not finite changes nothing."""
        inputs, targets = self.stream.next_batch()
        tokens = int(inputs.size)
        self.step_in_round += 1
        # counted with this step: at 0 tokens the warm-up's rate is 0, and a step would be lost
        lr = learning_rate(self.progress(), self.config.optimizer, self.config.schedule)
        loss, total, routed = self._gradients(inputs, targets)
        if not math.isfinite(total):
            self.model.zero_grad(set_to_none=True)
            return StepResult(loss=None, tokens=0, reason="the loss is not finite")
        norm = self.optimizer.step(lr)
        if not math.isfinite(norm):
            return StepResult(loss=None, tokens=0, reason="a gradient is not finite")
        trained = {SHARED: tokens, **{expert_part(e): routed[e] for e in self.model.owned}}
        for part in trained:
            self._clean.pop(part, None)
        self._trained.update(trained)
        self._losses.append(loss)
        self.steps += 1
        self.tokens += tokens
        return StepResult(loss=loss, tokens=tokens)

    @property
    def round_loss(self) -> float | None:
        """The mean training loss of the round so far."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss in nats per token on the run's held-out set.

        Over sources as they are weighted in training; `val_by_source` has the mean of each.
        """
        by_source = self.stream.held_out_by_source(self.config.data.eval_batches)
        self.val_by_source = {
            name: sum(float(self._forward(*b).cross_entropy) for b in batches) / len(batches)
            for name, batches in by_source.items()
        }
        self.val_loss = weighted_mean(self.val_by_source, self.config.data)
        return self.val_loss

    def _gradients(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[float, float, list[int]]:
        """Add up the gradients of a batch [B, T], a micro-batch of rows at a time.

        Returns the mean cross-entropy, the mean total loss (NaN: stopped at the first micro-batch
        that is not finite) and the token-slots of each expert. The balance and z-losses are means
        over micro-batches.
        """
        batch = inputs.shape[0]
        rows = min(self.setup.layout.rows or batch, batch)
        balance = owned_balance(self.global_tokens, self.config.loss)
        loss = total = 0.0
        routed = torch.zeros(self.config.model.n_experts, dtype=torch.int64)
        for row in range(0, batch, rows):
            piece = slice(row, row + rows)
            out = self._forward(inputs[piece], targets[piece], balance)
            share = inputs[piece].shape[0] / batch
            if not math.isfinite(float(out.total.detach())):
                return math.nan, math.nan, []
            (out.total if share == 1.0 else out.total * share).backward()
            loss += share * float(out.cross_entropy)
            total += share * float(out.total.detach())
            routed += out.tokens_per_expert_E.cpu()
        return loss, total, routed.tolist()

    def _forward(self, inputs: np.ndarray, targets: np.ndarray, balance: float = 1.0) -> LossOutput:
        ids_BT, targets_BT = (torch.from_numpy(a).to(self.device) for a in (inputs, targets))
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.setup.layout.half):
            return self.model.loss(ids_BT, targets_BT, self.config.loss, owned_balance=balance)

    # --- the round's exchange ---------------------------------------------------------------

    def snapshot(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Write what we trained in wire format; return its parts, and what was kept back."""
        offered, refused = [], []
        self._sent = {}
        for part in self.optimizer.trained_parts:
            held = part_values(self.model, part)
            sent = {n: to_wire(t, self.config.round.wire).cpu() for n, t in held.items()}
            if bad := check_finite(sent) or files.too_large(sent):
                refused.append(f"{part}: {bad}")
                continue
            digest, size = files.write_bundle(self.store.bundles, sent)
            self._sent[part] = sent
            tokens = self._trained[part]
            offered.append({"part": part, "tokens": tokens, "digest": digest, "size": size})
        return offered, refused

    def merge(self, number: int, plan: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Carry out a merge plan part by part; a bad input is left out and named."""
        rejected: list[dict[str, str]] = []
        merged: list[str] = []
        for entry in plan:
            part = entry["part"]
            inputs, bad = files.read_inputs(part, entry["inputs"], self.shapes[part])
            rejected += bad
            if not inputs:
                continue
            self._take(part, entry["own_tokens"], inputs)
            if len(entry["inputs"]) == 1:
                self._remember(part, entry["inputs"][0])
            merged.append(part)
        self._sent = {}
        return {"rejected": rejected, "merged": merged, "draws": self._merge_experts(number)}

    def _take(self, part: str, own_tokens: int | None, inputs: Sequence[Any]) -> None:
        """Aggregate inputs [(tokens, tensors)] with what we sent, or else adopt their aggregate."""
        held = part_values(self.model, part)
        base = self._sent.get(part) if own_tokens is not None else None
        if own_tokens is None or base is None:
            (own_tokens, base), *inputs = inputs
            held = base
        shares = weights(own_tokens, [tokens for tokens, _ in inputs])
        taken = {}
        for name, sent in base.items():  # into copies: a part changes whole or not at all
            taken[name] = held[name].to(torch.float32, copy=True)
            offers = [(w, t[name]) for w, (_, t) in zip(shares, inputs, strict=True)]
            aggregate(taken[name], sent, offers)
        load_part(self.model, part, taken)
        self._clean.pop(part, None)

    def _remember(self, part: str, source: Mapping[str, Any]) -> None:
        """Save and serve an adopted expert as the very bundle that came.

        What is held here may be rounded further (bf16, int8); loading the bundle again rounds it
        to the same bits, and others get what the owner made.
        """
        if part_expert(part) not in (None, *self.model.owned):
            self._clean[part] = (source["digest"], Path(source["path"]).stat().st_size)

    def _merge_experts(self, number: int) -> list[dict[str, list[int]]] | None:
        """Expert merging (SPES), while the schedule says so, on owned experts."""
        config = self.config.merging
        if not config.interval_rounds or number % config.interval_rounds:
            return None
        # the round's beginning is the same for all; one's own steps since are not
        alpha = merging_alpha(self.global_tokens, config)
        if alpha <= 0:
            return None
        owned = sorted(self.model.owned)
        drawn = merge_experts(expert_layers(self.model), owned, alpha, config.donors)
        for expert in owned:
            self._clean.pop(expert_part(expert), None)
        return [{str(e): donors for e, donors in layer.items()} for layer in drawn]

    def checkpoint(
        self, number: int, global_tokens: int, contributors: int, versions: Versions
    ) -> Path:
        """Save everything that `load_checkpoint` needs to go on exactly here.

        DamagedState if a part is not finite: loading refuses it, so it must not be the newest.
        """
        held = []
        for part in all_parts(self.config.model.n_experts):
            if part not in self._clean or not self.bundle(self._clean[part][0]).exists():
                tensors = part_values(self.model, part)
                if bad := check_finite(tensors):
                    raise DamagedState(f"{part} cannot be saved: {bad}")
                self._clean[part] = files.write_bundle(self.store.bundles, tensors)
            digest, size = self._clean[part]
            made, term = versions.get(part, (0, 0))
            held.append(StatePart(part=part, round=made, term=term, digest=digest, size=size))
        moments = []
        for part in self.optimizer.trained_parts:
            digest, size = files.write_bundle(self.store.bundles, self.optimizer.state_of(part))
            moments.append(Moments(part=part, digest=digest, size=size))
        return self.store.commit(
            Checkpoint(
                run_id=self.config.run_id,
                peer_id=self.setup.peer_id,
                round=number,
                global_tokens=global_tokens,
                contributors=contributors,
                parts=tuple(held),
                moments=tuple(moments),
                owned=tuple(sorted(self.model.owned)),
                steps=self.steps,
                tokens=self.tokens,
                stream=self.stream.state_dict(),
                loss=self.round_loss,
                val_loss=self.val_loss,
                created=time.time(),
            )
        )

    def bundle(self, digest: str) -> Path:
        """Where the bundle of this name lies."""
        return self.store.bundles / f"{digest}{files.SUFFIX}"
