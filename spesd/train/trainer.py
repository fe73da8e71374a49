"""One peer's trainer: the model, its optimizer and its text, in one process and one thread.

Decides how a step, a snapshot, a merge and a checkpoint change the weights. Never talks to
anybody: `child` gives it commands, weights come and go as files.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spesd.checkpoint.bundle import SUFFIX, read_bundle, write_bundle
from spesd.checkpoint.manifest import Checkpoint, Moments
from spesd.checkpoint.store import Store
from spesd.config import RunConfig
from spesd.data.stream import TextStream
from spesd.data.tokenizer import load_tokenizer
from spesd.errors import ProtocolViolation, Unavailable
from spesd.ids import SHARED, all_parts, expert_part, part_expert
from spesd.model.partition import expert_layers, load_part, part_shapes, parts
from spesd.model.transformer import MoETransformer
from spesd.swarm.records import StatePart
from spesd.train.merge import aggregate, check_finite, merge_experts, to_wire, weights
from spesd.train.optimizer import PeerOptimizer
from spesd.train.schedule import learning_rate, merging_alpha

_FROZEN = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TrainerSetup:
    """What a trainer must know of its run and its machine."""

    config: RunConfig
    peer_id: str
    store: Path  # the run's folder
    device: str = "cpu"
    owned: tuple[int, ...] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    tokenizer: Path | None = None
    frozen: str = "fp32"


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step: its loss (None if the step was skipped) and the tokens it trained on."""

    loss: float | None
    tokens: int
    reason: str = ""


class Trainer:
    """The trainer of one peer."""

    def __init__(self, setup: TrainerSetup) -> None:
        self.setup, self.config = setup, setup.config
        self.device = _device(setup.device)
        self.store = Store(setup.store)
        tokenizer = load_tokenizer(
            self.config.tokenizer, setup.tokenizer, self.config.model.vocab_size
        )
        self.stream = TextStream(
            self.config.data,
            tokenizer,
            seed=self.config.seed,
            peer_id=setup.peer_id,
            paths=setup.data,
        )
        self.model = MoETransformer(self.config.model, frozen_dtype=_FROZEN[setup.frozen])
        self.model.to(self.device)
        self.model.set_owned(setup.owned)
        self.optimizer = PeerOptimizer(self.model, self.config.optimizer)
        self.shapes = part_shapes(self.config.model)
        self.steps = self.tokens = 0
        self._clean: dict[str, tuple[str, int]] = {}  # parts on disk just as they are here
        self._sent: dict[str, dict[str, Tensor]] = {}
        self.begin_round(0, 0, 1)

    # --- weights in -------------------------------------------------------------------------

    def initialise(self) -> None:
        """Make the model's beginning: the same values on every peer of the run."""
        self.model.init_weights(self.config.seed)
        self._clean.clear()

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Go on exactly where a checkpoint of ours was made."""
        # owned first: experts that are still frozen would be loaded in the precision of the frozen
        if set(checkpoint.owned) != self.model.owned:
            self.set_owned(checkpoint.owned)
        self._load({p.part: (self.bundle(p.digest), p.digest) for p in checkpoint.parts})
        moments = {m.part: m.digest for m in checkpoint.moments}
        for part in self.optimizer.trained_parts:
            if part in moments:
                self.optimizer.load_state_of(part, self._read_moments(moments[part]))
        self.stream.load_state_dict(checkpoint.stream)
        self.steps, self.tokens = checkpoint.steps, checkpoint.tokens

    def load_state(self, given: Sequence[Mapping[str, Any]]) -> None:
        """Take a whole state from another peer; moments and place in the data stay ours."""
        self._load({p["part"]: (Path(p["path"]), p["digest"]) for p in given})

    def _load(self, files: Mapping[str, tuple[Path, str]]) -> None:
        missing = set(self.shapes) - files.keys()
        if missing:
            raise ProtocolViolation(f"a state lacks {sorted(missing)[0]}")
        for part in sorted(self.shapes):  # verified whole before the first weight changes
            path, digest = files[part]
            read_bundle(path, self.shapes[part], digest)
        for part in sorted(self.shapes):
            load_part(self.model, part, read_bundle(files[part][0], self.shapes[part], None))
        self._clean.clear()

    def _read_moments(self, digest: str) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        return load_file(self.bundle(digest))

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
        self._trained: dict[str, int] = {}

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
        out = self.model.loss(
            torch.from_numpy(inputs).to(self.device),
            torch.from_numpy(targets).to(self.device),
            self.config.loss,
        )
        loss = float(out.cross_entropy.detach())
        if not math.isfinite(float(out.total.detach())):
            self.model.zero_grad(set_to_none=True)
            return StepResult(loss=None, tokens=0, reason="the loss is not finite")
        out.total.backward()  # type: ignore[no-untyped-call]
        norm = self.optimizer.step(lr)
        if not math.isfinite(norm):
            return StepResult(loss=None, tokens=0, reason="a gradient is not finite")
        for part in self.optimizer.trained_parts:
            self._clean.pop(part, None)
        routed = out.tokens_per_expert_E.tolist()
        self._trained[SHARED] = self._trained.get(SHARED, 0) + tokens
        for expert in self.model.owned:
            part = expert_part(expert)
            self._trained[part] = self._trained.get(part, 0) + int(routed[expert])
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
        """Return the mean loss in nats per token on the run's held-out set."""
        losses = []
        for inputs, targets in self.stream.held_out_batches(self.config.data.eval_batches):
            out = self.model.loss(
                torch.from_numpy(inputs).to(self.device),
                torch.from_numpy(targets).to(self.device),
                self.config.loss,
            )
            losses.append(float(out.cross_entropy))
        return sum(losses) / len(losses)

    # --- the round's exchange ---------------------------------------------------------------

    def snapshot(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Write what we trained in wire format; return its parts, and what was kept back."""
        offered, refused = [], []
        self._sent = {}
        named = parts(self.model)
        for part in self.optimizer.trained_parts:
            sent = {n: to_wire(p.detach(), self.config.round.wire).cpu() for n, p in named[part]}
            bad = check_finite(sent)
            if bad:
                refused.append(f"{part}: {bad}")
                continue
            digest, size = write_bundle(self.store.bundles, sent)
            self._sent[part] = sent
            tokens = self._trained.get(part, 0)
            offered.append({"part": part, "tokens": tokens, "digest": digest, "size": size})
        return offered, refused

    def merge(self, number: int, plan: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Carry out a merge plan part by part; a bad input is left out and named."""
        rejected: list[dict[str, str]] = []
        merged: list[str] = []
        for entry in plan:
            part = entry["part"]
            inputs = []
            for source in entry["inputs"]:
                try:
                    tensors = read_bundle(
                        Path(source["path"]), self.shapes[part], source["digest"], ProtocolViolation
                    )
                except ProtocolViolation as error:
                    rejected.append({"peer": source["peer"], "part": part, "reason": str(error)})
                    continue
                inputs.append((int(source["tokens"]), source, tensors))
            if not inputs:
                continue
            if entry["own_tokens"] is not None and part in self._sent:
                self._aggregate(part, int(entry["own_tokens"]), inputs)
            else:
                self._adopt(part, inputs)
            merged.append(part)
        self._sent = {}
        return {"rejected": rejected, "merged": merged, "draws": self._merge_experts(number)}

    def _aggregate(self, part: str, own_tokens: int, inputs: Sequence[Any]) -> None:
        shares = weights(own_tokens, [tokens for tokens, _, _ in inputs])
        for name, parameter in parts(self.model)[part]:
            offers = [(w, t[name]) for w, (_, _, t) in zip(shares, inputs, strict=True)]
            aggregate(parameter.data, self._sent[part][name], offers)
        self._clean.pop(part, None)

    def _adopt(self, part: str, inputs: Sequence[Any]) -> None:
        first_tokens, first, base = inputs[0]
        shares = weights(first_tokens, [tokens for tokens, _, _ in inputs[1:]])
        adopted = {}
        for name, tensor in base.items():
            value = tensor.float()
            offers = [(w, t[name]) for w, (_, _, t) in zip(shares, inputs[1:], strict=True)]
            aggregate(value, tensor, offers)
            adopted[name] = value
        load_part(self.model, part, adopted)
        self._clean.pop(part, None)
        expert = part_expert(part)
        frozen = expert is not None and expert not in self.model.owned
        if frozen and len(inputs) == 1 and self.config.round.wire == self.setup.frozen:
            self._clean[part] = (first["digest"], Path(first["path"]).stat().st_size)

    def _merge_experts(self, number: int) -> list[dict[str, list[int]]] | None:
        """Expert merging (SPES), while the schedule says so, on owned experts."""
        config = self.config.merging
        if not config.interval_rounds or number % config.interval_rounds:
            return None
        alpha = merging_alpha(self.progress(), config)
        if alpha <= 0:
            return None
        drawn = merge_experts(
            expert_layers(self.model), sorted(self.model.owned), alpha, config.donors
        )
        for expert in self.model.owned:
            self._clean.pop(expert_part(expert), None)
        return [{str(e): donors for e, donors in layer.items()} for layer in drawn]

    # --- checkpoints ------------------------------------------------------------------------

    def checkpoint(
        self,
        number: int,
        global_tokens: int,
        contributors: int,
        versions: Mapping[str, Sequence[int]],
    ) -> Path:
        """Save everything that `load_checkpoint` needs to go on exactly here."""
        named = parts(self.model)
        held = []
        for part in all_parts(self.config.model.n_experts):
            if part not in self._clean or not self.bundle(self._clean[part][0]).exists():
                tensors = {n: p.detach() for n, p in named[part]}
                self._clean[part] = write_bundle(self.store.bundles, tensors)
            digest, size = self._clean[part]
            made, term = versions.get(part, (0, 0))
            held.append(StatePart(part=part, round=made, term=term, digest=digest, size=size))
        moments = []
        for part in self.optimizer.trained_parts:
            state = self.optimizer.state_of(part)
            if state:
                digest, size = write_bundle(self.store.bundles, state)
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
            )
        )

    def bundle(self, digest: str) -> Path:
        """Where the bundle of this name lies."""
        return self.store.bundles / f"{digest}{SUFFIX}"


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda"):
        index = int(name.partition(":")[2] or 0)
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise Unavailable(
                f"there is no device {name} here ({torch.cuda.device_count()} CUDA devices are "
                "visible to torch); use --device cpu, or mend the driver."
            )
    return torch.device(name)
