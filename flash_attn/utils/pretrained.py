"""Checkpoints as Hugging Face publishes them, in a folder or on its hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["state_dict_from_pretrained"]

# In the order in which they are looked for: a file of everything, or the list of files that share it.
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def state_dict_from_pretrained(
    model_name: str, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by their names there.

    Args:
        model_name: a folder, or a model on the hub, which the package ``transformers`` downloads and keeps.
        device: where to; the CPU if None.
        dtype: what floating point tensors are cast to.

    Raises:
        FileNotFoundError: no checkpoint is there.
        ImportError: it takes ``transformers`` or ``safetensors``, which is not installed.
    """
    folder = Path(model_name)
    find = _in_folder(folder) if folder.is_dir() else _on_hub(model_name)
    for name in (*_SAFETENSORS, *_PICKLES):
        if (path := find(name)) is None:
            continue
        paths = [path]
        if name.endswith(".json"):
            parts = sorted(set(json.loads(path.read_text())["weight_map"].values()))
            found = [find(part) for part in parts]
            paths = [part for part in found if part is not None]
            if len(paths) != len(parts):
                raise FileNotFoundError(f"{model_name}: {path.name} names {parts}, of which some are missing.")
        result: dict[str, Tensor] = {}
        for part in paths:
            result.update(_load(part, "cpu" if device is None else device))
        return {
            key: value.to(dtype) if dtype is not None and value.is_floating_point() else value
            for key, value in result.items()
        }
    raise FileNotFoundError(f"{model_name} has none of {', '.join((*_SAFETENSORS, *_PICKLES))}.")


def _in_folder(folder: Path) -> Callable[[str], Path | None]:
    return lambda name: folder / name if (folder / name).is_file() else None


def _on_hub(model_name: str) -> Callable[[str], Path | None]:
    try:
        from transformers.utils import cached_file
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{model_name} is no folder, and a model of the hub needs transformers: pip install transformers."
        ) from error

    def find(name: str) -> Path | None:
        path = cached_file(model_name, name, _raise_exceptions_for_missing_entries=False)
        return None if path is None else Path(path)

    return find


def _load(path: Path, device: torch.device | str) -> dict[str, Any]:
    if path.suffix != ".safetensors":
        result: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        return result
    try:
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        raise ImportError(f"Reading {path} needs safetensors: pip install safetensors.") from error
    return dict(load_file(path, device=str(device)))
