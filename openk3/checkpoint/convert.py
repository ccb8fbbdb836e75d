"""Packing and unpacking a checkpoint's routed experts, file to file: never more than one tensor in memory, whatever the model's size."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from openk3.errors import UserError
from openk3.ops.mx import MODES

from .expected import Spec, expected_tensors
from .names import keeps_float32, split_expert
from .reader import INDEX, SAFETENSORS, SINGLE, TORCH, Reader
from .writer import SHARD_BYTES, Item, config_for, pack_items, pad_heads, write

COMPANION_BYTES = 1 << 28  # tokenizers, chat formats, licences and the like are copied along; anything larger isn't one


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: Literal["bf16", "mxfp4"],
    *,
    mode: str = "even",
    max_shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Writes the checkpoint in folder `source` to folder `target` in another form; returns the target's path.

    to "mxfp4": dense experts are quantised with the scale `mode` (`ops/mx.py`), packed ones are copied code by code, and everything
    else is copied as stored. to "bf16": packed experts are unpacked, exactly, and all weights but those that are float32 in the
    release are rounded to bfloat16. Names become the released ones, `A_log` is padded. progress(bytes done, bytes in all).
    Raises `UserError` for a source that isn't whole, and for a target that holds a checkpoint already.
    """
    source, target = Path(source), Path(target)
    if to not in ("bf16", "mxfp4") or mode.lower() not in MODES:
        raise UserError(f"convert: to is bf16 or mxfp4, mode {', '.join(MODES)}; not {to!r} and {mode!r}")
    if (target / SINGLE).exists() or (target / INDEX).exists():
        raise UserError(f"{target}: already holds a checkpoint; give another folder")
    reader = Reader(source)
    reader.check()
    items = list(_items(reader, to, mode))
    config = config_for(reader.config, any(item.name.endswith(".weight_packed") for item in items), items)
    write(target, config, items, max_shard_bytes, progress, _companions(source))
    return target


def _items(reader: Reader, to: str, mode: str) -> Iterator[Item]:
    dense = expected_tensors(reader.config, packed=False)
    for name, (shape, _) in dense.items():
        expert = split_expert(name)
        if expert and (to == "mxfp4" or name not in reader.tensors):
            yield from _expert_items(reader, name.removesuffix(".weight"), shape, to, mode)
        elif name.endswith(".A_log"):
            heads = reader.config.text_config.linear_attn_config.num_heads  # type: ignore[union-attr]
            yield Item(name, "F32", shape, lambda name=name, heads=heads: pad_heads(reader.read_heads(name, heads)))
        else:
            dtype = torch.float32 if keeps_float32(name) else torch.bfloat16 if to == "bf16" else TORCH[reader.tensors[name].dtype]
            yield _copy(reader, name, (shape, SAFETENSORS[dtype]))


def _expert_items(reader: Reader, matrix: str, shape: tuple[int, ...], to: str, mode: str) -> Iterator[Item]:
    if to == "bf16":
        yield Item(f"{matrix}.weight", "BF16", shape, lambda: _dense(reader, matrix, shape))
    elif f"{matrix}.weight" in reader.tensors:
        yield from pack_items(matrix, shape, lambda: reader.read(f"{matrix}.weight"), mode)
    else:
        for kind in ("weight_packed", "weight_scale"):
            stored = reader.tensors[f"{matrix}.{kind}"]
            yield _copy(reader, f"{matrix}.{kind}", (stored.shape, stored.dtype))


def _copy(reader: Reader, name: str, spec: Spec) -> Item:
    shape, dtype = spec
    return Item(name, dtype, shape, lambda: reader.read(name).view(shape).to(TORCH[dtype]))


def _dense(reader: Reader, matrix: str, shape: tuple[int, ...]) -> Tensor:
    value = torch.empty(shape, dtype=torch.bfloat16)
    reader.read_dense(matrix, value)
    return value


def _companions(source: Path) -> list[Path]:
    """The folder's other files: tokenizer, chat format, licence…"""
    ours = {"config.json", INDEX}
    return [
        path
        for path in sorted(source.iterdir())
        if path.is_file() and path.suffix != ".safetensors" and path.name not in ours and not path.name.startswith(".")
        and path.stat().st_size <= COMPANION_BYTES
    ]  # fmt: skip
