"""What a checkpoint folder holds and what is wrong with it: `openk3 inspect DIR`. Headers alone by default, so 1.5 TB take seconds."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from openk3.config import K3Config
from openk3.errors import UserError
from openk3.ops.mx import E2M1, GROUP

from .expected import FLOATS, Stored, component, problems
from .names import is_vision, keeps_float32
from .reader import TORCH, Reader

_PIECE = 1 << 24  # elements looked at in one go


@dataclass(frozen=True)
class Group:
    """One component's share. `elements` are weights: two for each byte of packed codes, none for scales."""

    name: str
    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True)
class Audit:
    """`problems`: why `load` would refuse the folder, or what its values have that they shouldn't; `notes`: what is odd but harmless.

    `tensors` go by canonical name, in the files' order. block_max (after a full audit of packed experts): the share of MXFP4 blocks
    by their largest magnitude. Any 3 is the work of scale mode rceil, any 2 of ceil; only 4 and 6, of floor or even.
    """

    directory: Path
    config: K3Config
    files: list[Path]
    tensors: dict[str, Stored]
    groups: list[Group]
    dtypes: dict[str, int]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    block_max: dict[float, float] | None = None

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def elements(self) -> int:
        return sum(group.elements for group in self.groups)

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)


def audit(directory: str | os.PathLike[str], full: bool = False, progress: Callable[[int, int], None] | None = None) -> Audit:
    """Lists a checkpoint's tensors and compares them with its config. Raises `UserError` only where there is no checkpoint to look at.

    full: also read every value, for NaN and infinity, scale bytes of 255 and `A_log` padding that isn't zero.
    progress(tensors done, tensors in all), while reading.
    """
    reader = Reader(directory, strict=False)
    wrong = reader.broken + problems(reader.config, reader.tensors, reader.promised)
    maxima = None
    if full:
        found, maxima = _read_all(reader, progress)
        wrong += found
    dtypes = dict(Counter(tensor.dtype for tensor in reader.tensors.values()))
    return Audit(reader.directory, reader.config, reader.files, reader.tensors, _groups(reader), dtypes, wrong, _notes(reader), maxima)


def elements(tensor: Stored) -> int:
    """Weights in a stored tensor."""
    if tensor.name.endswith(".weight_scale"):
        return 0
    return prod(tensor.shape) * (2 if tensor.name.endswith(".weight_packed") else 1)


def _groups(reader: Reader) -> list[Group]:
    """By component, the largest first."""
    sums: dict[str, list[int]] = {}
    for name, tensor in reader.tensors.items():
        total = sums.setdefault(component(name), [0, 0, 0])
        for i, value in enumerate((1, elements(tensor), tensor.nbytes)):
            total[i] += value
    return sorted((Group(name, *total) for name, total in sums.items()), key=lambda group: -group.nbytes)


def _notes(reader: Reader) -> list[str]:
    notes = []
    vision = sum(map(is_vision, reader.tensors))
    if vision:
        notes.append(f"{vision} vision tensors are here; a text-only model leaves them on the disk (text_only=True)")
    renamed = [(tensor.name, name) for name, tensor in reader.tensors.items() if tensor.name != name]
    if renamed:
        notes.append(f"{len(renamed)} tensors have an early port's name, such as {renamed[0][0]} for {renamed[0][1]}")
    rounded = [t.name for name, t in reader.tensors.items() if keeps_float32(name) and t.dtype in ("BF16", "F16")]
    if rounded:
        notes.append(f"{len(rounded)} tensors that the release keeps in F32 are stored in fewer bits, such as {rounded[0]}")
    packed = sum(name.endswith(".weight_packed") for name in reader.tensors)
    if bool(packed) != reader.config.quantized:
        said = "says" if reader.config.quantized else "doesn't say"
        notes.append(f"config.json {said} that experts are packed, {packed} matrices are; the tensors decide")
    return notes


def _read_all(reader: Reader, progress: Callable[[int, int], None] | None) -> tuple[list[str], dict[float, float] | None]:
    """Faults of values, and the block maxima of packed experts."""
    found = []
    counts = torch.zeros(len(E2M1), dtype=torch.int64)
    linear = reader.config.text_config.linear_attn_config
    for done, (name, tensor) in enumerate(reader.tensors.items(), 1):
        if tensor.dtype not in TORCH:
            continue
        value = reader.read(name).flatten()
        where = f"{tensor.name} in {tensor.file.name}"
        if tensor.dtype in FLOATS:
            bad = sum(int((~piece.isfinite()).count_nonzero()) for piece in value.split(_PIECE))
            if bad:
                found.append(f"{where} has {bad} values that are NaN or infinite")
        elif name.endswith(".weight_scale"):
            bad = int((value == 255).count_nonzero())
            if bad:
                found.append(f"{where} has {bad} scale bytes of 255: their blocks are NaN")
        elif name.endswith(".weight_packed") and tensor.shape[-1] % (GROUP // 2) == 0:
            counts += _block_maxima(value)
        if name.endswith(".A_log") and linear is not None and tensor.dtype in FLOATS:
            try:
                reader.read_heads(name, linear.num_heads)
            except UserError as e:
                found.append(str(e))
        if progress is not None:
            progress(done, len(reader.tensors))
    blocks = int(counts.sum())
    return found, {value: int(n) / blocks for value, n in zip(E2M1, counts, strict=True) if n} if blocks else None


def _block_maxima(codes: Tensor) -> Tensor:
    """How many blocks have each magnitude as their largest, int64 `[8]`; codes uint8, flat, whole blocks."""
    counts = torch.zeros(len(E2M1), dtype=torch.int64)
    for piece in codes.split(_PIECE):
        largest = torch.maximum(piece & 7, piece >> 4 & 7).view(-1, GROUP // 2).amax(-1)
        counts += torch.bincount(largest, minlength=len(E2M1))
    return counts
