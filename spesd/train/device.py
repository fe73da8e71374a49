"""Which device of this machine a name means."""

import re

import torch

from spesd.errors import Unavailable, UsageError


def choose_device(name: str) -> torch.device:
    """Return the device; `auto` is the first CUDA device, or the CPU where there is none.

    Raises UsageError for what is no name of one, Unavailable for one that is not here.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise UsageError(f"device is {name!r}; it is auto, cpu or cuda:N.")
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    seen = torch.cuda.device_count()
    if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= seen:
        raise Unavailable(
            f"there is no device {name} here ({seen} CUDA devices are visible to torch); "
            "use --device cpu, or mend the driver."
        )
    return torch.device(name)
