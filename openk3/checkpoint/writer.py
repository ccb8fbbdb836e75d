"""Writing a checkpoint folder in the released layout: `save` for a model, `write` for any list of tensors made one at a time.

Whatever fails, the folder holds a whole checkpoint: the old one until the last rename, the new one after it. Files are written to a
subfolder first; shards get names that the old checkpoint doesn't use; then one rename (of the single file, or of the index) decides;
then the old files go. No more than one tensor is copied at a time.
"""

import dataclasses
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from openk3.config import K3Config
from openk3.errors import UserError
from openk3.ops.mx import GROUP, dequantize_mxfp4, quantize_mxfp4
from openk3.quantization import MXFP4_QUANTIZATION
from openk3.schema import FrozenDict

from .expected import expected_tensors
from .names import is_vision, keeps_float32, padded, released, split_stack
from .reader import INDEX, SAFETENSORS, SINGLE, TORCH

SHARD_BYTES = 5 * 10**9
ASIDE = ".saving"  # the subfolder; one that a killed process left behind is removed by the next save

# Everything but the routed experts is left alone: readers that go by this list (compressed-tensors) must not look for packed weights
# there. The release's list stops after mm_projector, though what follows isn't packed there either.
NOT_PACKED = (
    r"re:.*self_attn.*",
    r"re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*lm_head.*",
    r"re:.*vision_tower.*",
    r"re:.*mm_projector.*",
    r"re:.*routed_expert_(down|up)_proj.*",
    r"re:.*_res_proj.*",
    r"re:.*block_sparse_moe\.gate$",
)


@dataclass
class Item:
    """A tensor to be written: `make` gives it, on any device, when its turn comes."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * TORCH[self.dtype].itemsize


class PackOnce:
    """One expert's matrix, quantised when the first of its two tensors is asked for and kept until the second has been."""

    def __init__(self, matrix: Callable[[], Tensor], mode: str):
        self.matrix, self.mode = matrix, mode
        self.kept: dict[str, Tensor] = {}

    def take(self, kind: str) -> Tensor:
        if kind not in self.kept:
            codes, scale = quantize_mxfp4(self.matrix(), self.mode)
            self.kept = {"weight_packed": codes, "weight_scale": scale}
        return self.kept.pop(kind)


def save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int = SHARD_BYTES,
    layout: Literal["released"] = "released",
    experts: Literal["as-is", "dense", "packed"] = "as-is",
    dtype: torch.dtype | None = None,
    mode: str = "even",
) -> Path:
    """Writes model and config to a folder that `load` and other readers of the released layout take; returns its path.

    dtype: of all weights but those that are float32 in the release; None keeps the model's. experts: "dense" unpacks MXFP4,
    "packed" quantises dense experts with the scale `mode` (`ops/mx.py`), "as-is" does neither. Tokenizer and other files of the
    folder stay. Raises `UserError` for a full disk, a folder that can't be written, and widths that MXFP4 can't have.
    """
    if layout != "released" or experts not in ("as-is", "dense", "packed"):
        raise UserError(f"save: layout is 'released', experts as-is, dense or packed; not {layout!r} and {experts!r}")
    config: K3Config = model.config  # type: ignore[assignment]
    state = {_WRAPPERS.sub("", name): value for name, value in model.state_dict().items()}
    items = list(_items(state, config, experts, dtype, mode))
    names = {item.name for item in items}
    packed = any(name.endswith("_packed") for name in names)
    expected = expected_tensors(config, lambda matrix: f"{matrix}.weight_packed" in names)
    if wrong := {name for name in expected.keys() ^ names if not (is_vision(name) and name in expected)}:
        raise ValueError(f"the model's tensors aren't those of its config: {', '.join(sorted(wrong)[:5])}")
    if not any(is_vision(name) for name in names):
        config = dataclasses.replace(config, vision_config=None)
    write(directory, config_for(config, packed, items), items, max_shard_bytes)
    return Path(directory)


def _items(state: Mapping[str, Tensor], config: K3Config, experts: str, dtype: torch.dtype | None, mode: str) -> Iterator[Item]:
    """The state in released names: stacks as views of each expert, the rest as it is."""
    for name, value in state.items():
        stack = split_stack(name)
        kind = torch.float32 if keeps_float32(name) else dtype or value.dtype
        if stack is None:
            stored = released(name, config.flat)
            if name.endswith(".A_log"):
                yield Item(stored, "F32", (padded(len(value)),), lambda value=value: pad_heads(value))
            else:
                yield Item(stored, SAFETENSORS[kind], tuple(value.shape), lambda value=value, kind=kind: value.to(kind))
            continue
        module, which, suffix = stack
        rows = value.shape[1]
        for expert in range(len(value)):
            matrix = f"{released(module, config.flat)}.{expert}.{which}"
            if not suffix and experts != "packed":
                make = lambda value=value[expert], kind=kind: value.to(kind)  # noqa: E731
                yield Item(f"{matrix}.weight", SAFETENSORS[kind], tuple(value.shape[1:]), make)
            elif not suffix:
                yield from pack_items(matrix, tuple(value.shape[1:]), lambda value=value[expert]: value, mode)
            elif experts != "dense":
                yield Item(f"{matrix}.weight{suffix}", "U8", tuple(value.shape[1:]), lambda value=value[expert]: value)
            elif suffix == "_packed":
                scale, kind = state[f"{module}.{which}_scale"][expert], dtype or _main_dtype(state)
                make = lambda codes=value[expert], scale=scale, kind=kind: dequantize_mxfp4(codes, scale, kind)  # noqa: E731
                yield Item(f"{matrix}.weight", SAFETENSORS[kind], (rows, value.shape[2] * 2), make)


def pack_items(matrix: str, shape: tuple[int, ...], make: Callable[[], Tensor], mode: str) -> Iterator[Item]:
    """The two tensors of an expert's matrix that is quantised on its way to the file."""
    if shape[1] % GROUP:
        raise UserError(f"{matrix} is {list(shape)}: MXFP4 needs input columns in groups of {GROUP}; keep these experts dense")
    once = PackOnce(make, mode)
    for kind, columns in (("weight_packed", shape[1] // 2), ("weight_scale", shape[1] // GROUP)):
        yield Item(f"{matrix}.{kind}", "U8", (shape[0], columns), lambda kind=kind: once.take(kind))


def pad_heads(value: Tensor) -> Tensor:
    """`A_log` `[H]` as the release stores it: zeros up to a multiple of 128."""
    return torch.nn.functional.pad(value.detach().float(), (0, padded(len(value)) - len(value)))


def _main_dtype(state: Mapping[str, Tensor]) -> torch.dtype:
    return state["lm_head.weight"].dtype


def config_for(config: K3Config, packed: bool, items: Iterable[Item]) -> K3Config:
    """The config that tells the truth about these tensors: `quantization_config` exactly where experts are packed, and their dtype."""
    head = next(item.dtype for item in items if item.name.endswith("lm_head.weight"))
    if packed and not config.quantized:
        config = config.replace_text(quantization_config=FrozenDict({**MXFP4_QUANTIZATION, "ignore": NOT_PACKED}))
    return config.with_quantization(packed).with_dtype(str(TORCH[head]).removeprefix("torch."))


def write(
    directory: str | os.PathLike[str],
    config: K3Config,
    items: Iterable[Item],
    max_shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
    companions: Iterable[Path] = (),
) -> None:
    """Puts a checkpoint into a folder, all or nothing. companions: other files to copy in. progress(bytes done, bytes in all)."""
    directory = Path(directory)
    shards = _shards(items, max_shard_bytes)
    done, total = 0, sum(item.nbytes for shard in shards for item in shard)
    aside = directory / ASIDE
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        names = _shard_names(directory, len(shards))
        for name, shard in zip(names, shards, strict=True):
            done = write_file(aside / name, shard, done, total, progress)
        if len(shards) > 1:
            where = {item.name: name for name, shard in zip(names, shards, strict=True) for item in shard}
            (aside / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n")
        for companion in companions:
            shutil.copyfile(companion, aside / companion.name)
        config.save(aside)
        _put_in_place(aside, directory)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            needs = f"saving needs {total / 1e9:.3g} GB beside what is there"
            raise UserError(f"{directory}: disk full: {needs}; free space or choose another folder") from None
        raise UserError(f"{e.filename or directory}: can't save: {e.strerror or e}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if made and directory.exists() and not any(directory.iterdir()):
            directory.rmdir()


def write_file(path: Path, items: list[Item], done: int = 0, total: int = 0, progress: Callable[[int, int], None] | None = None) -> int:
    """One safetensors file, tensor by tensor; returns `done` and the bytes written."""
    items = sorted(items, key=lambda item: (-TORCH[item.dtype].itemsize, item.name))  # as safetensors does: every tensor starts aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for item in items:
        header[item.name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": [end, end + item.nbytes]}
        end += item.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for item in items:
            value = item.make().detach().cpu().contiguous()
            if value.dtype != TORCH[item.dtype] or tuple(value.shape) != item.shape:
                raise ValueError(f"{item.name}: {value.dtype} {tuple(value.shape)} where {item.dtype} {item.shape} was announced")
            f.write(value.flatten().view(torch.uint8).numpy().data)
            done += item.nbytes
            if progress is not None:
                progress(done, total)
        f.flush()
        os.fsync(f.fileno())
    return done


def _shards(items: Iterable[Item], max_shard_bytes: int) -> list[list[Item]]:
    """Cut in the order given; a tensor larger than the limit has a shard to itself."""
    if max_shard_bytes <= 0:
        raise UserError(f"max_shard_bytes is {max_shard_bytes}: it must be above 0")
    shards: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.nbytes
    return shards


def _shard_names(directory: Path, count: int) -> list[str]:
    """`model.safetensors`, or numbered shards of a generation none of whose names is taken in the folder."""
    if count == 1:
        return [SINGLE]
    generation = 1
    while True:
        stem = "model" if generation == 1 else f"model.{generation}"
        names = [f"{stem}-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
        if not any((directory / name).exists() for name in names):
            return names
        generation += 1


def _put_in_place(aside: Path, directory: Path) -> None:
    """The new checkpoint's files from `aside`; the one that decides which checkpoint the folder holds comes last, then the old one goes."""
    new = {path.name for path in aside.iterdir()}
    decides = INDEX if INDEX in new else SINGLE
    old = {path.name for path in directory.iterdir() if path.name in (SINGLE, INDEX) or _SHARD.fullmatch(path.name)} - new
    config = directory / "config.json"
    before = config.read_bytes() if config.exists() else None
    moved: list[Path] = []
    try:
        for name in [*sorted(new - {decides, config.name}), config.name, decides]:
            os.replace(aside / name, directory / name)
            moved.append(directory / name)
    except OSError:
        for path in moved:
            if _SHARD.fullmatch(path.name):
                path.unlink()
            elif path == config and before is not None:
                (aside / config.name).write_bytes(before)
                os.replace(aside / config.name, config)
        raise
    for name in sorted(old):
        (directory / name).unlink()


_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")  # torch.compile's and activation checkpointing's
_SHARD = re.compile(r"model(\.\d+)?-\d{5,6}-of-\d{5,6}\.safetensors")
