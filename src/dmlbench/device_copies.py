"""Copies from the host to the device that nothing waits for."""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dmlbench.types import Batch


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to the device; from the host to CUDA through pinned memory, so that nothing waits."""
    if tensor.device.type != "cpu" or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def batch_on(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch's images to the device; labels and ids stay on the host."""
    second = None if batch.second_views is None else to_device(batch.second_views, device)
    return replace(batch, images=to_device(batch.images, device), second_views=second)


def ahead_of_computing(device: torch.device, make: Callable[[], Batch]) -> Batch:
    """Make a batch on a CUDA stream of its own: it is copied while the device computes the step before."""
    stream = _copy_stream(device)
    if stream is None:
        return make()
    with torch.cuda.stream(stream):
        batch = make()
    computing = torch.cuda.current_stream(device)
    computing.wait_stream(stream)
    for images in (batch.images, batch.second_views):
        if images is not None:
            images.record_stream(computing)  # its memory must not be given away before the step is done
    return batch


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None
