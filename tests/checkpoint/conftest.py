"""Golden checkpoints, and ways to spoil a copy of one."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Durability against power loss isn't tested; waiting for it would be most of the time."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(scope="session")
def folder_of(golden) -> Callable[[str], Path]:
    return lambda name: golden(name).directory


@pytest.fixture
def edited(tmp_path, folder_of) -> Callable[..., Path]:
    """`edited("k3-tiny", change, shards=1, config=…)`: a copy whose tensors `change` has edited in place."""

    def make(name: str, change: Callable[[dict[str, torch.Tensor]], None] | None = None, shards: int = 1, config=None) -> Path:
        folder = tmp_path / "edited"
        folder.mkdir()
        shutil.copyfile(folder_of(name) / "config.json", folder / "config.json")
        tensors = load_file(folder_of(name) / "model.safetensors")
        if change is not None:
            change(tensors)
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
        else:
            names = [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
            for n, file in enumerate(names):
                save_file({key: tensors[key] for key in list(tensors)[n::shards]}, folder / file)
            where = {key: names[n % shards] for n, key in enumerate(tensors)}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
        if config is not None:
            content = json.loads((folder / "config.json").read_text())
            config(content)
            (folder / "config.json").write_text(json.dumps(content))
        return folder

    return make


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, by an independent reader."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    found = {}
    for file in sorted(set(json.loads(index.read_text())["weight_map"].values())):
        found |= load_file(folder / file)
    return found


@pytest.fixture(scope="session")
def read() -> Callable[[Path], dict[str, torch.Tensor]]:
    return tensors_of


@pytest.fixture(scope="session")
def equal() -> Callable[[dict, dict], bool]:
    """Same names, dtypes, shapes and bytes."""

    def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
        return a.keys() == b.keys() and all(
            a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a
        )

    return same
