"""Whether what a rank of a folded pipeline holds fits its memory, asked before any of it is loaded.

Two stages on a rank are two models with two sets of input buffers. Weights are counted from the checkpoint's own table
of contents; a model that is no folder of safetensors is not counted, and loading it shows.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch
from prefill_runtime.engine.errors import SettingsError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GIB = 1 << 30
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
TOKEN_ID_BYTES = 4


class Weights(NamedTuple):
    """Bytes by layer, and of what belongs to none: embedding, norm, head."""

    layers: dict[int, int]
    outer: int


class Need(NamedTuple):
    """Bytes that one rank must hold."""

    weights: int
    cache: int
    buffers: int

    def __str__(self) -> str:
        return (
            f"weights {self.weights / GIB:.2f} GiB, KV cache of one prompt of full length {self.cache / GIB:.2f} GiB, "
            f"token buffers of two stages {self.buffers / GIB:.2f} GiB"
        )


def check_memory(vllm_config: VllmConfig, rank: int, ranges: Sequence[tuple[int, int]], device: Any) -> None:
    """SettingsError when the rank's stages, layers [first, last) each, cannot fit."""
    weights = read_weights(Path(vllm_config.model_config.model), vllm_config)
    if weights is None:
        return
    layers = [layer for first, last in ranges for layer in range(first, last)]
    need = Need(
        sum(weights.layers.get(layer, 0) for layer in layers) + (weights.outer if rank == 0 else 0),
        len(layers) * cache_bytes_per_layer(vllm_config),
        2 * TOKEN_ID_BYTES * vllm_config.scheduler_config.max_num_seqs * vllm_config.model_config.max_model_len,
    )
    free = free_bytes(device)
    if sum(need) > free:
        named = " and ".join(f"{first}-{last - 1}" for first, last in ranges)
        raise SettingsError(
            f"rank {rank} cannot hold layers {named}: {need}; together {sum(need) / GIB:.2f} GiB, and "
            f"{free / GIB:.2f} GiB are free. Use more ranks, give this one fewer layers (layerPartition), or lower "
            f"--max-model-len or --max-num-seqs"
        )


def cache_bytes_per_layer(vllm_config: VllmConfig) -> int:
    """Of one prompt as long as the model allows; 0 where layers do not keep all of it."""
    model = vllm_config.model_config
    if getattr(model.hf_text_config, "sliding_window", None) or getattr(model.hf_text_config, "layer_types", None):
        return 0
    heads = model.get_num_kv_heads(vllm_config.parallel_config)
    vectors = 1 if model.use_mla else 2 * heads
    return int(vectors * model.get_head_size() * model.dtype.itemsize * model.max_model_len)


def read_weights(folder: Path, vllm_config: VllmConfig) -> Weights | None:
    """As loaded: in the model's type, of which each tensor-parallel rank has its part."""
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return None
    model, parts = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    layers, outer = dict[int, int](), 0
    for name, kind, size in _tensors(folder):
        if model.quantization is None and kind in _FLOATS:
            size = size * model.dtype.itemsize // _FLOATS[kind]
        size //= parts
        if found := _LAYER.search(name):
            layers[int(found[1])] = layers.get(int(found[1]), 0) + size
        else:
            outer += size
    return Weights(layers, outer)


def _tensors(folder: Path) -> Iterator[tuple[str, str, int]]:
    """Name, type and bytes, from the headers of the files."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                yield name, entry["dtype"], last - first


def free_bytes(device: Any) -> int:
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    return int(getattr(torch, device.type).mem_get_info()[0])
