"""Check of a device argument."""

import torch


def check_device(device: torch.device | str) -> torch.device:
    """Return the device after checking that it can compute.

    Raises:
        RuntimeError: If there is no such device.
        ValueError: If its tensors have no data, such as meta.
    """
    found = torch.device(device)
    if found.type == "meta":
        raise ValueError("its tensors have no data; expected cpu, cuda, cuda:1, ...")
    return found
