"""Copies between host and device for which nothing waits, and what the host still knows of them."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dmlbench.types import Batch

_HOST_COPY = "_host_copy"  # attribute of a tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on the device; from the host to CUDA through pinned memory, so that nothing waits for the copy."""
    if tensor.device.type != "cpu" or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def with_host_copy(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``to_device``, for what is read on both sides and never changed: ``on_host`` returns the original."""
    moved = to_device(tensor, device)
    if moved is not tensor and tensor.device.type == "cpu":
        setattr(moved, _HOST_COPY, tensor)
    return moved


def on_host(tensor: Tensor) -> Tensor:
    """The tensor on the CPU; a GPU is waited for, unless it got the tensor by ``with_host_copy``."""
    original: Tensor | None = getattr(tensor, _HOST_COPY, None)
    return tensor.cpu() if original is None else original


def taken(tensor: Tensor, index: Tensor) -> Tensor:
    """``tensor[index]``, with a host copy where both have one."""
    rows = tensor[index]
    if hasattr(tensor, _HOST_COPY) and hasattr(index, _HOST_COPY):
        setattr(rows, _HOST_COPY, on_host(tensor)[on_host(index)])
    return rows


def batch_on(batch: Batch, device: torch.device) -> Batch:
    """A batch on the device; its labels and ids with a host copy."""
    labels, ids = (with_host_copy(x, device) for x in (batch.labels, batch.ids))
    second = None if batch.second_views is None else to_device(batch.second_views, device)
    return Batch(to_device(batch.images, device), labels, ids, second)


def ahead_of_computing(device: torch.device, make: Callable[[], Batch]) -> Batch:
    """A batch made on CUDA on a stream of its own: it is copied while the device still computes the step before."""
    stream = _copy_stream(device)
    if stream is None:
        return make()
    with torch.cuda.stream(stream):
        batch = make()
    computing = torch.cuda.current_stream(device)
    computing.wait_stream(stream)
    for tensor in (batch.images, batch.labels, batch.ids, batch.second_views):
        if tensor is not None:
            tensor.record_stream(computing)  # its memory must not be given away before the step is done
    return batch


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None
