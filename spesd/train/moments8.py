"""AdamW with its two moments in 8 bits, by bitsandbytes, where that library is installed.

Decides how its state is made beforehand and how it is read and set as plain fp32 tensors, so that a
checkpoint or a hand-over does not depend on how a peer holds its moments. The arithmetic is the
library's (Dettmers et al., 8-bit Optimizers via Block-wise Quantization).
"""

from typing import Any

import torch
from torch import Tensor

from spesd.errors import Unavailable

_BLOCK = 256  # numbers that share a scale
_NAMES = {"exp_avg": ("state1", "absmax1", "qmap1"), "exp_avg_sq": ("state2", "absmax2", "qmap2")}


def library() -> Any:
    """Return bitsandbytes, or say what to install."""
    try:
        import bitsandbytes
    except ImportError:
        raise Unavailable(
            'moments in 8 bits need the library bitsandbytes: pip install "spesd[adam8]", or set '
            "moments = 32 in peer.toml."
        ) from None
    return bitsandbytes


def make(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """Return the optimizer with its state made, all zero."""
    adam = library().optim.AdamW8bit(groups, **settings)
    for number, group in enumerate(adam.param_groups):
        for index, parameter in enumerate(group["params"]):
            adam.init_state(group, parameter, number, index)
    adam.initialized = True
    return adam  # type: ignore[no-any-return]


def read(state: dict[str, Any], key: str) -> Tensor:
    """Return one moment, or the step (shape []), as fp32."""
    if key == "step":
        return torch.tensor(float(state["step"]))
    whole, absmax, code = _NAMES[key]
    if state[whole].dtype == torch.float32:  # the library keeps small tensors as they are
        return state[whole].detach().clone()  # type: ignore[no-any-return]
    values: Tensor = library().functional.dequantize_blockwise(
        state[whole], absmax=state[absmax], code=state[code], blocksize=_BLOCK
    )
    return values


def write(state: dict[str, Any], key: str, values: Tensor) -> None:
    """Set one moment, or the step, to fp32 values."""
    if key == "step":
        state["step"] = int(values)
        return
    whole, absmax, code = _NAMES[key]
    if state[whole].dtype == torch.float32:
        state[whole].copy_(values)
        return
    rounded, how = library().functional.quantize_blockwise(
        values.to(state[whole].device, torch.float32), code=state[code], blocksize=_BLOCK
    )
    state[whole].copy_(rounded)
    state[absmax].copy_(how.absmax)
