"""Reading a checkpoint folder: `Reader` maps its safetensors files and gives one tensor at a time; `load` makes a model of them.

The files are parsed here, not with `safetensors.safe_open`, because that maps a file writable when it gives torch tensors: Linux then
refuses a shard that is larger than the memory. A read-only map has no such limit, and a header alone tells everything but the values.
"""

import dataclasses
import json
import mmap
import os
import warnings
from math import prod
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from openk3.config import K3Config
from openk3.errors import UserError
from openk3.model.k3 import K3ForCausalLM
from openk3.model.latent_moe import Experts
from openk3.model.quantized import PackedExperts
from openk3.ops.mx import dequantize_mxfp4, quantize_mxfp4

from .expected import FLOATS, Stored, problems
from .names import canonical, is_vision, keeps_float32, released, split_stack

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH = {  # the dtypes that can be read: no other has a place in a checkpoint of this family
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
}
SAFETENSORS = {dtype: name for name, dtype in TORCH.items()}


class Reader:
    """The config and the tensors of a checkpoint folder, by canonical name; only headers are read until a tensor is asked for.

    Raises `UserError` for a folder without a checkpoint, a missing shard, a cut or corrupt file and a tensor stored twice. With `strict`
    False a broken file is noted in `broken` instead, and its tensors are missing.
    """

    def __init__(self, directory: str | os.PathLike[str], strict: bool = True):
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise UserError(f"{self.directory}: no such folder; give a checkpoint folder (config.json and {SINGLE} or its shards)")
        self.config = K3Config.load(self.directory)
        self.files, self.promised = _find_files(self.directory)
        self.tensors: dict[str, Stored] = {}
        self.broken: list[str] = []
        self._maps: dict[Path, memoryview] = {}
        for file in self.files:
            try:
                self._add(read_header(file))
            except UserError as e:
                if strict:
                    raise
                self.broken.append(str(e))

    def _add(self, tensors: list[Stored]) -> None:
        for tensor in tensors:
            name = canonical(tensor.name, self.config.flat)
            if name in self.tensors:
                first = self.tensors[name]
                both = f"{first.name} in {first.file.name} and {tensor.name} in {tensor.file.name}"
                raise UserError(f"{self.directory}: one tensor is stored twice: {both}; remove one")
            self.tensors[name] = tensor

    def check(self, text_only: bool = False) -> None:
        """Raises `UserError` unless the tensors are those that the config implies (vision tensors aside, where `text_only`)."""
        config, tensors = self.config, self.tensors
        if text_only:
            config = dataclasses.replace(config, vision_config=None)
            tensors = {name: tensor for name, tensor in tensors.items() if not is_vision(name)}
        if wrong := problems(config, tensors, self.promised):
            raise UserError(f"{self.directory}: {'; '.join(wrong)}; `openk3 inspect {self.directory}` lists what is there")

    def read(self, name: str) -> Tensor:
        """The tensor as stored, a view of the file: it must not be written to, and copies what is kept."""
        tensor = self.tensors[name]
        data = self._map(tensor.file)
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=TORCH[tensor.dtype])
        with warnings.catch_warnings():  # torch warns once that the buffer is read-only, which is what we want
            warnings.simplefilter("ignore", UserWarning)
            flat = torch.frombuffer(data, dtype=TORCH[tensor.dtype], count=prod(tensor.shape), offset=tensor.start)
        return flat.view(tensor.shape)

    def read_dense(self, matrix: str, out: Tensor) -> None:
        """One expert's matrix (`…experts.7.w1`) into `out`, whether it's stored dense or packed."""
        if f"{matrix}.weight" in self.tensors:
            out.copy_(self.read(f"{matrix}.weight"))
        else:
            codes, scale = (self.read(f"{matrix}.{kind}").to(out.device) for kind in ("weight_packed", "weight_scale"))
            dequantize_mxfp4(codes, scale, out=out)

    def read_packed(self, matrix: str, codes: Tensor, scale: Tensor, mode: str = "even") -> None:
        """One expert's matrix into MXFP4 `codes` and `scale`: copied where it's stored packed, quantised where it's stored dense."""
        if f"{matrix}.weight_packed" in self.tensors:
            codes.copy_(self.read(f"{matrix}.weight_packed"))
            scale.copy_(self.read(f"{matrix}.weight_scale"))
        else:
            for into, made in zip((codes, scale), quantize_mxfp4(self.read(f"{matrix}.weight"), mode), strict=True):
                into.copy_(made)

    def read_heads(self, name: str, heads: int) -> Tensor:
        """`A_log` `[heads]` from any of its stored forms. Raises `UserError` where its padding isn't zero."""
        value = self.read(name).flatten()
        if value[heads:].count_nonzero():
            tensor = self.tensors[name]
            raise UserError(f"{tensor.file}: {tensor.name} isn't zero after its {heads} heads: another model's, or damaged; copy it again")
        return value[:heads]

    def _map(self, file: Path) -> memoryview:
        if file not in self._maps:
            try:
                with file.open("rb") as f:
                    self._maps[file] = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
            except OSError as e:
                raise UserError(f"{file}: can't read it: {e.strerror or e}") from None
        return self._maps[file]


def _find_files(directory: Path) -> tuple[list[Path], dict[str, Path]]:
    """The weight files, and, from an index, the shard that each stored name is promised in. A single file goes before an index."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE], {}
    index = directory / INDEX
    if not index.is_file():
        shards = f", though it has *.safetensors files: their {INDEX} is missing" if any(directory.glob("*.safetensors")) else ""
        raise UserError(f"{directory}: no {SINGLE} and no {INDEX} here{shards}")
    try:
        names = json.loads(index.read_bytes())["weight_map"]
        paths = {file: directory / file for file in set(names.values())}
        promised = {name: paths[file] for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
        raise UserError(f"{index}: not an index of shards ({type(e).__name__}: {e}); copy it again") from None
    files = sorted(paths.values())
    if outside := [file for file in files if file.parent != directory]:
        raise UserError(f"{index}: names {outside[0]}, which isn't a file of this folder")
    if absent := [file.name for file in files if not file.is_file()]:
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        raise UserError(f"{directory}: {len(absent)} of {len(files)} shards are missing: {', '.join(absent[:5])}{more}; copy them again")
    return files, promised


def read_header(file: Path) -> list[Stored]:
    """What a safetensors file holds. Raises `UserError` unless its size is exactly what its header promises."""
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > size - 8:
                raise UserError(f"{file}: cut off or not a safetensors file ({size:,} bytes don't hold its header); copy it again")
            header = json.loads(f.read(length))
        header.pop("__metadata__", None)
        tensors = []
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if not all(isinstance(n, int) and n >= 0 for n in (start, end, *shape)):
                raise ValueError(f"{name} has a negative or fractional size")
            if entry["dtype"] in TORCH and end - start != prod(shape) * TORCH[entry["dtype"]].itemsize:
                raise ValueError(f"{name} has {end - start} bytes for {entry['dtype']} {list(shape)}")
            tensors.append(Stored(name, file, entry["dtype"], shape, 8 + length + start, end - start))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        if isinstance(e, UserError):
            raise
        raise UserError(f"{file}: corrupt safetensors header ({e}); copy it again") from None
    except OSError as e:
        raise UserError(f"{file}: can't read it: {e.strerror or e}") from None
    end = 8 + length
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != end:
            raise UserError(f"{file}: corrupt safetensors header ({tensor.name} overlaps another tensor or leaves a gap); copy it again")
        end += tensor.nbytes
    if end != size:
        raise UserError(f"{file}: {size:,} bytes where its header promises {end:,}: cut off or damaged; copy it again")
    return tensors


def load(
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = "auto",
    device: torch.device | str = "cpu",
    experts: Literal["auto", "packed", "dense"] = "auto",
    text_only: bool = False,
) -> K3ForCausalLM:
    """The model of a checkpoint folder, in evaluation mode: every tensor of the files finds its place, or a `UserError` says which doesn't.

    dtype: of all weights but those that are float32 in the release; "auto" or None: as stored (the widest, where they differ).
    experts: "packed" keeps MXFP4 in memory (dense ones are quantised, scale mode even), "dense" unpacks it, exactly for bfloat16 and
      wider; "auto": as stored, layer by layer. text_only: leave the vision tower and its projector on the disk.

    The model is built without storage and each tensor is copied from the mapped file into its place once.
    """
    reader = Reader(directory)
    reader.check(text_only)
    config = dataclasses.replace(reader.config, vision_config=None) if text_only else reader.config
    with torch.device("meta"):
        model = K3ForCausalLM(config)
    if config.vision_config is not None and not any(is_vision(name) for name in model.state_dict()):
        raise UserError(f"{directory}: the checkpoint has a vision tower, which this model doesn't run; load it with text_only=True")
    _pack_layers(model, reader, experts)
    dtype = _dtype(dtype, reader)
    state = {}
    for name, like in model.state_dict().items():
        kind = torch.uint8 if like.dtype == torch.uint8 else torch.float32 if keeps_float32(name) else dtype
        state[name] = torch.empty(like.shape, dtype=kind, device=device)
    for name, value in state.items():
        _fill(name, value, state, reader)
    model.load_state_dict(state, assign=True)
    return model.eval()


def _pack_layers(model: K3ForCausalLM, reader: Reader, experts: str) -> None:
    """Puts `PackedExperts` where a layer's experts shall stay MXFP4."""
    if experts not in ("auto", "packed", "dense"):
        raise UserError(f"experts is {experts!r}: auto, packed or dense")
    for name, module in list(model.named_modules()):
        if not isinstance(module, Experts) or experts == "dense":
            continue
        stem, (count, hidden, latent) = released(name, reader.config.flat), module.w1.shape
        stored = (f"{stem}.{e}.{w}.weight_packed" in reader.tensors for e in range(count) for w in ("w1", "w2", "w3"))
        if experts == "packed" or all(stored):
            with torch.device("meta"):
                packed = PackedExperts(count, latent, hidden, module.act)
            setattr(model.get_submodule(name.rpartition(".")[0]), "experts", packed)  # noqa: B010


def _dtype(dtype: torch.dtype | str | None, reader: Reader) -> torch.dtype:
    if dtype in (None, "auto"):
        stored = {t.dtype for name, t in reader.tensors.items() if t.dtype in FLOATS and not keeps_float32(name) and not is_vision(name)}
        widest = [TORCH[name] for name in ("F64", "F32", "F16", "BF16") if name in stored]
        return torch.float32 if {"F16", "BF16"} <= stored else widest[0]
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or SAFETENSORS.get(found) not in FLOATS:
        raise UserError(f"dtype is {dtype!r}: auto, bfloat16, float16, float32 or float64")
    return found


def _fill(name: str, value: Tensor, state: dict[str, Tensor], reader: Reader) -> None:
    """One tensor of the model, by its name there, from the files."""
    stack = split_stack(name)
    if stack is None:
        stored = released(name, reader.config.flat)
        value.copy_(reader.read_heads(stored, len(value)) if name.endswith(".A_log") else reader.read(stored).view(value.shape))
        return
    module, which, kind = stack
    for expert in range(len(value)):
        matrix = f"{released(module, reader.config.flat)}.{expert}.{which}"
        if not kind:
            reader.read_dense(matrix, value[expert])
        elif kind == "_packed":  # fills both; the scales' own turn has nothing left to do
            reader.read_packed(matrix, value[expert], state[f"{module}.{which}_scale"][expert])
