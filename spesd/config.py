"""RunConfig: what every peer of a run agrees on, hashed into the run's id.

Decides which settings exist, which combinations are possible, and their one canonical form. It
never holds anything about a machine (that is `peerconfig.PeerConfig`), and nothing here is read
from the environment. A change of any value is another run.
"""

import dataclasses
import hashlib
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from spesd.configtree import fraction, from_tree, not_negative, positive
from spesd.errors import ConfigError

MAX_CONFIG_BYTES = 64 * 1024  # a config travels in one message; far above any real one


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The MoE transformer's shape (the OLMoE architecture; SPES, appendix on models)."""

    vocab_size: int = 264
    d_model: int = 64
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 4
    head_dim: int = 16
    ffn: int = 128  # width of one expert
    n_experts: int = 8
    top_k: int = 2
    qk_norm: Literal["full", "per_head", "none"] = "full"
    norm_topk_prob: bool = False
    tie_embeddings: bool = False
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim",
                     "ffn", "n_experts", "top_k"):  # fmt: skip
            positive(f"model.{name}", getattr(self, name))
        for name in ("rope_theta", "rms_eps", "init_std"):
            positive(f"model.{name}", getattr(self, name))
        if self.top_k > self.n_experts:
            raise ConfigError(
                f"model.top_k is {self.top_k} but model.n_experts is {self.n_experts}: a token "
                "cannot go to more experts than there are; lower top_k."
            )
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"model.n_heads ({self.n_heads}) is not a multiple of model.n_kv_heads "
                f"({self.n_kv_heads}); choose a divisor of n_heads."
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model.head_dim is {self.head_dim}: rotary embeddings turn pairs, so make it even."
            )
        if self.n_experts > 4096:
            raise ConfigError(
                f"model.n_experts is {self.n_experts}: at most 4096 can be advertised."
            )


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of the auxiliary losses (SPES, training details)."""

    load_balance: float = 0.01
    router_z: float = 0.001
    output_z: float = 1e-5
    owned_balance: float = 1.0  # what a peer's own experts count at first (1.0: as all others)
    owned_balance_tokens: int = 10_000_000

    def __post_init__(self) -> None:
        for name in ("load_balance", "router_z", "output_z"):
            not_negative(f"loss.{name}", getattr(self, name))
        fraction("loss.owned_balance", self.owned_balance)
        positive("loss.owned_balance_tokens", self.owned_balance_tokens)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, local to each peer."""

    lr: float = 4e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "grad_clip"):
            positive(f"optimizer.{name}", getattr(self, name))
        for name in ("beta1", "beta2"):
            fraction(f"optimizer.{name}", getattr(self, name), below_one=True)
        not_negative("optimizer.weight_decay", self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over the swarm's tokens: linear warm-up, then `kind` to `final_fraction`."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_tokens: int = 100_000
    total_tokens: int = 20_000_000
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        not_negative("schedule.warmup_tokens", self.warmup_tokens)
        positive("schedule.total_tokens", self.total_tokens)
        fraction("schedule.final_fraction", self.final_fraction)
        if self.warmup_tokens >= self.total_tokens:
            raise ConfigError(
                f"schedule.warmup_tokens ({self.warmup_tokens}) must be below "
                f"schedule.total_tokens ({self.total_tokens})."
            )


@dataclass(frozen=True, kw_only=True)
class RoundConfig:
    """When a round closes and how it is exchanged (ARCHITECTURE.md, the round)."""

    local_steps: int = 100
    quorum: float = 0.5
    overlap: bool = False
    deadline_s: float = 120.0  # longest wait for others; the adaptive deadline stays below it
    gossip_fanout: int = 0  # partners per co-owned part and round; 0 means every co-owner
    wire: Literal["bf16", "fp32"] = "bf16"
    checkpoint_every: int = 1  # rounds
    eval_every: int = 1  # rounds

    def __post_init__(self) -> None:
        positive("round.local_steps", self.local_steps)
        fraction("round.quorum", self.quorum)
        positive("round.quorum", self.quorum)
        positive("round.deadline_s", self.deadline_s)
        not_negative("round.gossip_fanout", self.gossip_fanout)
        positive("round.checkpoint_every", self.checkpoint_every)
        positive("round.eval_every", self.eval_every)
        if self.overlap:
            raise ConfigError(
                "round.overlap = true is not supported by this version: set it to false."
            )


@dataclass(frozen=True, kw_only=True)
class MergingConfig:
    """Expert merging (SPES, section on expert merging): alpha decays linearly to 0."""

    interval_rounds: int = 0  # 0 switches it off
    alpha: float = 0.05
    decay_tokens: int = 10_000_000
    donors: int = 4

    def __post_init__(self) -> None:
        not_negative("merging.interval_rounds", self.interval_rounds)
        fraction("merging.alpha", self.alpha)
        positive("merging.decay_tokens", self.decay_tokens)
        positive("merging.donors", self.donors)


@dataclass(frozen=True, kw_only=True)
class SwarmConfig:
    """Who must be there, and how much each is expected to own."""

    min_peers: int = 1  # the first round waits for this many
    experts_per_peer: int = 0  # 0: as many as each peer's memory holds

    def __post_init__(self) -> None:
        positive("swarm.min_peers", self.min_peers)
        not_negative("swarm.experts_per_peer", self.experts_per_peer)


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of text. `kind = "builtin"` is the corpus shipped with spesd."""

    kind: Literal["builtin", "text", "jsonl", "parquet", "hub"] = "builtin"
    path: str = ""  # file, glob or hub name; nothing for builtin
    name: str = "builtin"  # how a peer's own config refers to it
    field: str = "text"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.kind != "builtin" and not self.path:
            raise ConfigError(f"data.sources: the source {self.name!r} needs a path.")
        positive("data.sources.weight", self.weight)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read and how it is cut: documents packed to (batch_size, seq_len)."""

    seq_len: int = 128
    batch_size: int = 8
    held_out: float = 0.02  # share of the documents that is never trained on
    eval_batches: int = 8
    sources: tuple[SourceConfig, ...] = (SourceConfig(),)

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "eval_batches"):
            positive(f"data.{name}", getattr(self, name))
        fraction("data.held_out", self.held_out, below_one=True)
        positive("data.held_out", self.held_out)
        if not self.sources:
            raise ConfigError("data.sources is empty: name at least one source of text.")
        names = [source.name for source in self.sources]
        if len(set(names)) != len(names):
            raise ConfigError(f"data.sources: two sources share a name in {names}.")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one local step trains on."""
        return self.seq_len * self.batch_size


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """`bytes` is the embedded default; `file` is a tokenizer.json named by its digest."""

    kind: Literal["bytes", "file"] = "bytes"
    path: str = ""  # where the founder has it; not part of the run's identity
    digest: str = ""  # names the file's bytes; joiners fetch it from the swarm

    def __post_init__(self) -> None:
        if self.kind == "file" and not (self.path or self.digest):
            raise ConfigError('tokenizer.kind = "file" needs tokenizer.path.')


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """`random` weights from the seed, or the `weights` that `spesd import` wrote."""

    kind: Literal["random", "weights"] = "random"
    path: str = ""  # where the founder has them; not part of the run's identity
    digest: str = ""  # names their bytes; joiners get them from the swarm

    def __post_init__(self) -> None:
        if self.kind == "weights" and not (self.path or self.digest):
            raise ConfigError('start.kind = "weights" needs start.path.')


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that all peers of a run agree on."""

    name: str = "run"
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    round: RoundConfig = field(default_factory=RoundConfig)
    merging: MergingConfig = field(default_factory=MergingConfig)
    swarm: SwarmConfig = field(default_factory=SwarmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    start: StartConfig = field(default_factory=StartConfig)

    def __post_init__(self) -> None:
        if not (0 < len(self.name) <= 64) or not all(c.isalnum() or c in "-_." for c in self.name):
            raise ConfigError(
                f"name is {self.name!r}: use 1 to 64 letters, digits, dashes, dots or underscores."
            )
        not_negative("seed", self.seed)
        if self.seed >= 2**63:
            raise ConfigError("seed is too large: choose one below 2**63.")
        check_coverable(self, self.swarm.experts_per_peer or self.model.n_experts)

    def canonical(self) -> bytes:
        """Return the one JSON form that is hashed and that travels to joiners."""
        tree = dataclasses.asdict(self)
        del tree["tokenizer"]["path"], tree["start"]["path"]
        return json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @property
    def run_id(self) -> str:
        """The run's id: the first 32 hex digits of the SHA-256 of the canonical form."""
        return hashlib.sha256(self.canonical()).hexdigest()[:32]


def check_coverable(config: RunConfig, experts_per_peer: int) -> None:
    """Refuse a run whose first peers cannot own every expert between them."""
    peers, experts = config.swarm.min_peers, config.model.n_experts
    if experts_per_peer > experts:
        raise ConfigError(
            f"a peer cannot own {experts_per_peer} experts: model.n_experts is {experts}."
        )
    if peers * experts_per_peer < experts:
        raise ConfigError(
            f"the {experts} experts cannot be covered by swarm.min_peers = {peers} peer(s) that "
            f"own {experts_per_peer} each: raise min_peers, or the experts that each peer owns."
        )


def run_config_from_toml(path: Path) -> RunConfig:
    """Read a founder's run.toml; every refusal names the file and the key."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"there is no {path}; `spesd new --preset tiny -o {path}` writes one."
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not a readable TOML file: {error}.") from None
    try:
        return from_tree(RunConfig, tree)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def run_config_from_canonical(raw: bytes, run_id: str) -> RunConfig:
    """Read a config that came from the swarm, and check that it is the run's own."""
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigError(f"the run's config is larger than {MAX_CONFIG_BYTES} bytes; refused.")
    if hashlib.sha256(raw).hexdigest()[:32] != run_id:
        raise ConfigError(f"the config that a peer sent does not hash to the run id {run_id}.")
    try:
        tree = json.loads(raw)
    except ValueError:
        raise ConfigError("the run's config is not valid JSON.") from None
    return from_tree(RunConfig, tree)
