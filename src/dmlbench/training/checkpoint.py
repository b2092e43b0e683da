"""Checkpoints that are whole or absent, read without executing code."""

import io
import os
from pathlib import Path
from typing import Any

import torch

from dmlbench.runtime import atomic_write, reason_of
from dmlbench.types import RunError


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` (tensors, numbers, strings, lists, dictionaries) atomically.

    Raises:
        RunError: the file cannot be written (folder read-only, disk full); an earlier checkpoint is untouched.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        atomic_write(path, buffer.getbuffer())
    except OSError as error:
        kept = "the checkpoint before it is whole" if path.exists() else "there is no earlier one"
        raise RunError(
            f"cannot write the checkpoint {path} ({len(buffer.getbuffer())} bytes): {error.strerror or error}; {kept}; "
            "free the space or fix the permissions, then start the same command again"
        ) from error


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint onto the CPU with ``weights_only=True``.

    Raises:
        RunError: the file is truncated or not a checkpoint.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # torch raises RuntimeError, EOFError, UnpicklingError, ... for a damaged file
        raise RunError(
            f"the checkpoint {path} ({os.path.getsize(path)} bytes) cannot be read: {reason_of(error)}; "
            "it is truncated or not a checkpoint of dmlbench; delete the checkpoints of this run to start it again"
        ) from error
    if not isinstance(state, dict):
        raise RunError(
            f"{path} holds a {type(state).__name__}, not a checkpoint; delete it to start from the beginning"
        )
    return state
