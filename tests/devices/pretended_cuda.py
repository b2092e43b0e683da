"""A CUDA device without a GPU: torch's fake tensors say where they lie, and twins on the CPU hold their values.

Every operation runs twice: on the fakes, where torch refuses to mix devices, and on the twins, so that the code takes
the branches that it takes in a training. What needs a value or a shape that the device alone knows is answered by the
twins. Nothing is differentiated: that needs a driver.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from dmlbench import device_copies

CUDA = torch.device("cuda", 0)

_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)


class PretendedCuda(TorchDispatchMode):
    """Within ``pretended_cuda`` alone."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args)  # of the fake
        flat, form = tree_flatten((args, kwargs))
        asked = kwargs.get("device")
        if not any(isinstance(x, FakeTensor) for x in flat) and (asked is None or torch.device(asked).type != "cuda"):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode not yet taken apart
                return func.decompose(*args, **kwargs)
        twins = [_twin(x) for x in flat]
        twin_args, twin_kwargs = tree_unflatten(twins, form)
        with unset_fake_temporarily():
            values = func(*twin_args, **twin_kwargs)
        if func in _COPIES:
            return self._copied(func, args, kwargs, values)
        try:
            fakes = func(*tree_map_only(Tensor, self._fake, args), **tree_map_only(Tensor, self._fake, kwargs))
        except (DataDependentOutputException, DynamicOutputShapeException):
            return tree_map_only(Tensor, self._on_device, values)
        return _paired(fakes, values, {id(twin): x for x, twin in zip(flat, twins, strict=True)})

    def _copied(self, func: Any, args: Any, kwargs: Any, values: Tensor) -> Tensor:
        if func is _aten.copy_.default:
            return args[0]
        place = torch.device(kwargs.get("device") or args[0].device)
        return values if place.type == "cpu" else self._on_device(values)

    def _fake(self, x: Tensor) -> Tensor:
        return x if isinstance(x, FakeTensor) else self._fakes.from_tensor(x)

    def _on_device(self, values: Tensor) -> Tensor:
        fake = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=CUDA)
        fake.twin = values  # type: ignore[attr-defined]
        return fake


def _twin(x: Any) -> Any:
    if isinstance(x, FakeTensor):
        return x.twin  # type: ignore[attr-defined]
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _paired(fakes: Any, values: Any, inputs: dict[int, Any]) -> Any:
    """The fakes with their values as twins; outputs that are an input are that very tensor."""
    flat, form = tree_flatten(fakes)
    for i, (fake, value) in enumerate(zip(flat, tree_flatten(values)[0], strict=True)):
        if id(value) in inputs:
            flat[i] = inputs[id(value)]
        elif isinstance(fake, FakeTensor) and fake.device.type == "cuda":
            # what only a backward pass reads (statistics of batch norm) may be saved by one device and not by the other
            assert fake.shape == value.shape or not value.numel()
            fake.twin = value  # type: ignore[attr-defined]
        else:
            flat[i] = value
    return tree_unflatten(flat, form)


@contextlib.contextmanager
def pretended_cuda() -> Iterator[None]:
    """Within, tensors on "cuda" can be made and computed with, and nothing is really pinned or copied by a stream."""
    off = torch.backends.cudnn.flags(enabled=False)  # its batch norm is an operation that no CPU has
    with pytest.MonkeyPatch.context() as patch, off, FakeTensorMode() as fakes, PretendedCuda(fakes):
        patch.setattr(Tensor, "pin_memory", Tensor.clone)
        patch.setattr(device_copies, "_copy_stream", lambda device: None)
        yield


def moved(module: nn.Module) -> nn.Module:
    """A module that was made on the CPU, with its parameters and buffers on the pretended device."""
    known: dict[int, Tensor] = {}
    for part in module.modules():
        for values in (part._parameters, part._buffers):
            for name, x in values.items():
                if x is not None:
                    if id(x) not in known:
                        there = x.detach().to(CUDA)
                        known[id(x)] = nn.Parameter(there, x.requires_grad) if isinstance(x, nn.Parameter) else there
                    values[name] = known[id(x)]  # type: ignore[assignment]
    return module
