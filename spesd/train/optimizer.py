"""AdamW over what this peer trains: the shared parameters and the experts that it owns.

Decides which parameters decay, how gradients are clipped, and what of the optimizer's state
survives a change of ownership. It never sends anything: moments leave only through `state_of`, for
a checkpoint or for the peer that takes an expert over.

Weight decay applies to matrices only (embeddings, attention, routers, experts), not to norm gains:
a gain decayed to 0 switches its layer off, and 0.1 would do so over a long run.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spesd.config import OptimizerConfig
from spesd.model.partition import parts
from spesd.model.transformer import MoETransformer
from spesd.train import moments8

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"


class PeerOptimizer:
    """The optimizer of one peer. Call `rebuild` after every `model.set_owned`."""

    def __init__(
        self, model: MoETransformer, config: OptimizerConfig, *, moments8: bool = False
    ) -> None:
        """`moments8` holds the moments in 8 bits; Unavailable if the library for it is missing."""
        self.model = model
        self.config = config
        self.moments8 = moments8
        self._members: dict[str, dict[str, nn.Parameter]] = {}
        self._adam: torch.optim.Optimizer = self._build({})

    def rebuild(self) -> None:
        """Follow the model's new ownership.

        Parts that are still trained keep their moments; new ones start without; those of parts
        given up are dropped (read them with `state_of` before `set_owned` if they move on).
        """
        kept = {
            name: self._adam.state[parameter]
            for members in self._members.values()
            for name, parameter in members.items()
        }
        self._adam = self._build(kept)

    def step(self, lr: float) -> float:
        """Clip gradients to `grad_clip`, update, drop the gradients; return their norm before.

        A norm that is not finite means no update: one bad batch must not write NaN into every
        weight. The caller sees the norm and decides what else to do.
        """
        # In the model's own order, on which the last bit of the norm depends.
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip))
        if math.isfinite(norm):
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return norm

    @property
    def trained_parts(self) -> list[str]:
        """The parts with moments here: the shared parameters and the owned experts."""
        return list(self._members)

    @property
    def moment_bytes(self) -> int:
        """What the optimizer's state takes."""
        return sum(
            tensor.nbytes
            for members in self._members.values()
            for parameter in members.values()
            for tensor in self._adam.state[parameter].values()
            if isinstance(tensor, Tensor)
        )

    def state_of(self, part: str) -> dict[str, Tensor]:
        """Copy a part's moments: `NAME.exp_avg`, `NAME.exp_avg_sq` (fp32), `NAME.step` (fp32, []).

        All zero before the first step. Raises KeyError for a part that is not trained here.
        """
        return {
            f"{name}.{key}": self._read(parameter, key)
            for name, parameter in self._members[part].items()
            for key in (*_MOMENTS, _STEP)
        }

    def load_state_of(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        """Set a part's moments to what `state_of` gave, here or at another peer.

        Raises ValueError, before anything is changed, unless names and shapes are exactly the
        part's and values are possible; KeyError for a part that is not trained here.
        """
        members = self._members[part]
        _check_state(members, tensors)
        for name, parameter in members.items():
            for key in (*_MOMENTS, _STEP):
                self._write(parameter, key, tensors[f"{name}.{key}"])

    def _read(self, parameter: nn.Parameter, key: str) -> Tensor:
        state = self._adam.state[parameter]
        if self.moments8:
            return moments8.read(state, key)
        copy: Tensor = state[key].detach().clone()
        return copy

    def _write(self, parameter: nn.Parameter, key: str, values: Tensor) -> None:
        state = self._adam.state[parameter]
        if self.moments8:
            moments8.write(state, key, values)
        else:
            state[key].copy_(values)

    def _build(self, kept: Mapping[str, dict[str, Any]]) -> torch.optim.Optimizer:
        self._members = {
            part: trained
            for part, members in parts(self.model).items()
            if (trained := {name: p for name, p in members if p.requires_grad})
        }
        by_name = {name: p for members in self._members.values() for name, p in members.items()}
        everything = [p for p in self.model.parameters() if p.requires_grad]
        fused = everything[0].device.type in ("cpu", "cuda")  # 3x the plain loop's speed on CPU
        groups: list[dict[str, Any]] = [
            {"params": [p for p in everything if p.ndim >= 2]},
            {"params": [p for p in everything if p.ndim < 2], "weight_decay": 0.0},
        ]
        settings: dict[str, Any] = {
            "lr": self.config.lr,
            "betas": (self.config.beta1, self.config.beta2),
            "eps": self.config.eps,
            "weight_decay": self.config.weight_decay,
        }
        if self.moments8:
            adam = moments8.make(groups, **settings)
            for name, parameter in by_name.items():
                adam.state[parameter] = kept.get(name) or adam.state[parameter]
            return adam
        adam = torch.optim.AdamW(groups, fused=fused, **settings)
        # Made here and not by the first step: memory that does not suffice shows at the start,
        # and blocks that stay for ever do not end up between those that come and go.
        for name, parameter in by_name.items():
            adam.state[parameter] = kept.get(name) or _fresh_state(parameter, fused=fused)
        return adam


def _fresh_state(parameter: nn.Parameter, *, fused: bool) -> dict[str, Tensor]:
    """What torch's AdamW starts with; it keeps the step beside the moments only when fused."""
    step = torch.zeros((), device=parameter.device if fused else "cpu")
    return {_STEP: step, **{key: torch.zeros_like(parameter) for key in _MOMENTS}}


def _check_state(members: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    for name, parameter in members.items():
        expected |= {f"{name}.{key}": tuple(parameter.shape) for key in _MOMENTS}
        expected[f"{name}.{_STEP}"] = ()
    if expected.keys() != tensors.keys():
        odd = sorted(expected.keys() ^ tensors.keys())
        raise ValueError(f"the moments are not of this part's parameters: {odd[0]!r} is odd")
    for key, shape in expected.items():
        tensor = tensors[key]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{key} has the shape {list(tensor.shape)}, not {list(shape)}")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{key} is not finite")
        if not key.endswith(".exp_avg") and (tensor < 0).any():
            raise ValueError(f"{key} is negative")
