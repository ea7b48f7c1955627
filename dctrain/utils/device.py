"""Devices that a command may be asked to run on."""

import torch


def check_device(device: torch.device | str) -> torch.device:
    """Return a device that computes.

    Raises:
        RuntimeError: If there is no such device.
        ValueError: If it holds no numbers.
    """
    found = torch.device(device)
    if found.type == "meta":
        raise ValueError("tensors on it hold no numbers; expected cpu, cuda, cuda:1, ...")
    return found
