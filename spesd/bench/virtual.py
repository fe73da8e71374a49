"""A swarm in one process: the product's own trainers, exchanging bundles through one folder.

Decides only who owns what and in which order peers train and merge; steps, snapshots, aggregation,
adoption and expert merging are `Trainer`'s. All peers are always there and finish every round
together, which is what compares ways of learning and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spesd.checkpoint.bundle import SUFFIX
from spesd.config import RunConfig, SourceConfig
from spesd.data.stream import TextStream
from spesd.data.tokenizer import load_tokenizer
from spesd.memory import Layout
from spesd.train.protocol import TrainerSetup
from spesd.train.trainer import Trainer

Offers = list[dict[str, dict[str, Any]]]  # by peer, by part


@dataclass(frozen=True, kw_only=True)
class Cast:
    """Who takes part: peer `i` trains on `domains[i]` and owns `owned[i]`."""

    run: RunConfig  # its data are evaluated on
    domains: Sequence[Sequence[SourceConfig]]
    owned: Sequence[tuple[int, ...]]
    layout: Layout
    rows: int = 0  # rows of a step, where they are not the run's
    contributors: int = 0  # peers that the schedule counts; 0: those that there are

    @property
    def counted(self) -> int:
        """Peers whose tokens drive the schedule."""
        return self.contributors or len(self.domains)


def spread(peers: int, experts: int, k: int) -> list[tuple[int, ...]]:
    """Give each peer k neighbouring experts, so that all experts have alike many owners."""
    starts = [peer * experts // peers for peer in range(peers)]
    return [tuple(sorted((s + j) % experts for j in range(k))) for s in starts]


class VirtualSwarm:
    """Peers that train and merge in turn. Subclasses change what happens around a merge."""

    def __init__(self, cast: Cast, folder: Path) -> None:
        self.cast, self.folder = cast, folder
        self.config = cast.run
        self.peers = [self._peer(i) for i in range(len(cast.domains))]
        self.round = 0
        self.tokens = 0  # of the whole swarm
        self.sent_bytes = self.fetched_bytes = 0  # per peer, over the whole run
        data, tokenizer = self.config.data, load_tokenizer(self.config.tokenizer, None, 264)
        judge = TextStream(data, tokenizer, seed=self.config.seed, peer_id="judge")
        self._held_out = judge.held_out_batches(data.eval_batches)

    def _peer(self, index: int) -> Trainer:
        cast = self.cast
        data = replace(cast.run.data, sources=tuple(cast.domains[index]))
        if cast.rows:
            data = replace(data, batch_size=cast.rows)
        trainer = Trainer(
            TrainerSetup(
                config=replace(cast.run, data=data),
                peer_id=f"peer-{index}",
                store=self.folder,
                owned=tuple(cast.owned[index]),
                layout=cast.layout,
            )
        )
        trainer.initialise()
        return trainer

    def run_round(self, steps: int) -> None:
        """Train `steps` steps on every peer, then merge (a lone peer has nothing to merge)."""
        self.round += 1
        for peer in self.peers:
            peer.begin_round(self.round, self.tokens, self.cast.counted)
        for index in range(len(self.peers)):
            self.train(index, steps)
        self.tokens += steps * self.peers[0].config.data.tokens_per_step * self.cast.counted
        if len(self.peers) > 1 and not self.cast.contributors:
            self.merge()
            for file in (self.folder / "bundles").glob(f"*{SUFFIX}"):
                file.unlink()

    def train(self, index: int, steps: int) -> None:
        """Make one peer's steps of a round."""
        for _ in range(steps):
            self.peers[index].step()

    def merge(self) -> None:
        """Let every peer offer what it trained, fetch the rest, and merge."""
        offers = self.offers()
        for index in range(len(self.peers)):
            self.merge_one(index, offers)

    def offers(self) -> Offers:
        """Return what each peer offers of this round, by part."""
        found = []
        for index, peer in enumerate(self.peers):
            made, refused = peer.snapshot()
            if refused:
                raise RuntimeError(f"peer {index} could not offer: {refused[0]}")
            self.sent_bytes += sum(m["size"] for m in made) // len(self.peers)
            found.append(
                {
                    m["part"]: {**m, "path": str(peer.bundle(m["digest"])), "peer": str(index)}
                    for m in made
                }
            )
        return found

    def merge_one(self, index: int, offers: Offers) -> None:
        """Merge everybody's offers into one peer."""
        peer, plan = self.peers[index], []
        for part in peer.shapes:
            inputs = [o[part] for i, o in enumerate(offers) if i != index and part in o]
            own = offers[index].get(part)
            self.fetched_bytes += sum(i["size"] for i in inputs) // len(self.peers)
            plan.append({"part": part, "own_tokens": own and int(own["tokens"]), "inputs": inputs})
        rejected = peer.merge(self.round, plan)["rejected"]
        if rejected:
            raise RuntimeError(f"peer {index} rejected {rejected[0]}")

    @torch.no_grad()
    def held_out_loss(self, of: int | None = None) -> float:
        """Return the mean held-out loss over the first `of` peers (all), nats per token."""
        judged = self.peers[:of]
        losses = [float(p._forward(*b).cross_entropy) for p in judged for b in self._held_out]
        return sum(losses) / len(losses)
