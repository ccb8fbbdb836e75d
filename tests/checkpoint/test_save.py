"""Saving: what is written loads as it was, looks as the release looks, and nothing half-written stays when the disk is full."""

import errno
import json
import os
import re
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.checkpoint import load, save
from openk3.checkpoint import writer as writer_module
from openk3.checkpoint.expected import expected_tensors
from openk3.checkpoint.names import keeps_float32
from openk3.checkpoint.reader import SAFETENSORS, Reader
from openk3.checkpoint.writer import ASIDE, Item, _shards
from openk3.config import K3Config
from openk3.errors import UserError
from openk3.model.k3 import K3ForCausalLM
from openk3.ops.mx import dequantize_mxfp4, quantize_mxfp4
from openk3.presets import preset


@pytest.fixture(scope="module")
def tiny(folder_of):
    return load(folder_of("k3-tiny"))


@pytest.fixture(scope="module")
def packed(folder_of):
    return load(folder_of("k3-tiny-mxfp4"))


def same_state(a, b) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["k3-tiny", "k3-tiny-mxfp4"])
def test_golden_file_comes_back(folder_of, read, equal, tmp_path, name):
    """Released names, padded A_log, dtypes: tensor for tensor the file that was loaded, and its config."""
    assert save(load(folder_of(name)), tmp_path) == tmp_path
    assert listing(tmp_path) == ["config.json", "model.safetensors"]
    assert equal(read(tmp_path), read(folder_of(name)))
    assert K3Config.load(tmp_path) == K3Config.load(folder_of(name))


@pytest.mark.parametrize("name", ["nano", "dense-nano", "k2-nano"])
@pytest.mark.parametrize("flat", [False, True])
def test_every_kind_of_model_comes_back(tmp_path, name, flat):
    """Full-width experts, plain attention, plain residual, wrapped and flat configs; from random values, in shards."""
    config = preset(name, vocab_size=128)
    if config.text_config.num_experts is not None:
        config = config.replace_text(num_experts=10)
    if flat:
        config = K3Config(text_config=config.text_config, model_type="kimi_linear")
    model = K3ForCausalLM(config).init_weights(seed=1)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.normal_(generator=torch.Generator().manual_seed(2))
    save(model, tmp_path, max_shard_bytes=2_000_000)
    again = load(tmp_path)
    assert same_state(model, again) and again.config.text_config == config.text_config
    assert not flat or all(not name.startswith("language_model.") for name in Reader(tmp_path).promised)


def test_written_as_safetensors_writes(tiny, tmp_path):
    """Aligned, gap-free, and with the metadata that transformers asks for."""
    save(tiny, tmp_path)
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt"}
    assert all(t.start % 8 == 0 for t in Reader(tmp_path).tensors.values() if t.dtype == "F32")
    packed = Reader(save(load(tmp_path), tmp_path / "p", experts="packed", dtype=torch.bfloat16)).tensors.values()
    assert all(t.start % {"F32": 4, "BF16": 2, "U8": 1}[t.dtype] == 0 for t in packed)


def test_dtype_bfloat16(tiny, read, folder_of, tmp_path):
    save(tiny, tmp_path, dtype=torch.bfloat16)
    stored, before = read(tmp_path), read(folder_of("k3-tiny"))
    for name, value in stored.items():
        assert value.dtype == (torch.float32 if keeps_float32(name) else torch.bfloat16)
        assert torch.equal(value, before[name].to(value.dtype))
    assert K3Config.load(tmp_path).dtype == "bfloat16" and load(tmp_path).lm_head.weight.dtype == torch.bfloat16


def test_float32_tensors_are_written_float32_from_a_half_model(folder_of, read, tmp_path):
    save(load(folder_of("k3-tiny")).to(torch.bfloat16), tmp_path)
    stored = read(tmp_path)
    assert {SAFETENSORS[v.dtype] for n, v in stored.items() if keeps_float32(n)} == {"F32"}
    assert {SAFETENSORS[v.dtype] for n, v in stored.items() if not keeps_float32(n)} == {"BF16"}


def test_shards_follow_the_layers_and_the_limit(folder_of, tiny, read, equal, tmp_path):
    limit = 300_000
    save(tiny, tmp_path, max_shard_bytes=limit)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))] and len(files) > 8
    sizes = {file: sum(t.nbytes for t in Reader(tmp_path).tensors.values() if t.file.name == file) for file in files}
    assert max(sizes.values()) <= limit and index["metadata"]["total_size"] == sum(sizes.values())
    assert equal(read(tmp_path), read(folder_of("k3-tiny")))
    where = index["weight_map"]
    assert where["language_model.model.layers.1.mlp_res_norm.weight"] < where["language_model.model.layers.7.mlp_res_norm.weight"]


@given(sizes=st.lists(st.integers(0, 50), max_size=30), limit=st.integers(1, 60))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_cutting_into_shards(sizes, limit):
    items = [Item(str(i), "U8", (n,), lambda: None) for i, n in enumerate(sizes)]
    shards = _shards(items, limit)
    assert [item for shard in shards for item in shard] == items
    assert all(sum(i.nbytes for i in shard) <= limit or len([i for i in shard if i.nbytes]) == 1 for shard in shards)


def test_packing_while_saving(tiny, read, folder_of, tmp_path):
    save(tiny, tmp_path, experts="packed", mode="rceil")
    stored, before = read(tmp_path), read(folder_of("k3-tiny"))
    assert set(stored) == set(expected_tensors(K3Config.load(tmp_path)))
    for name in (n for n in before if ".experts." in n):
        codes, scale = quantize_mxfp4(before[name], "rceil")
        assert torch.equal(stored[f"{name}_packed"], codes) and torch.equal(stored[f"{name}_scale"], scale)
    assert K3Config.load(tmp_path).text_config.quantization_config["format"] == "mxfp4-pack-quantized"
    assert hasattr(load(tmp_path).model.layers[1].block_sparse_moe.experts, "w1_packed")


def test_ignore_list_covers_every_matrix_that_is_not_packed(tiny, tmp_path):
    """compressed-tensors' readers take each Linear that no `ignore` pattern matches for a packed one."""
    save(tiny, tmp_path, experts="packed")
    patterns = [p.removeprefix("re:") for p in K3Config.load(tmp_path).text_config.quantization_config["ignore"]]
    names = [name for name, t in Reader(tmp_path).tensors.items() if len(t.shape) == 2 and "embed_tokens" not in name]  # of Linears
    for name in names:
        ignored = any(re.match(pattern, name.rpartition(".")[0]) for pattern in patterns)
        assert ignored != name.endswith(("_packed", "_scale")), name


def test_each_matrix_is_quantised_once(tiny, tmp_path, monkeypatch):
    calls = []
    real = writer_module.quantize_mxfp4
    monkeypatch.setattr(writer_module, "quantize_mxfp4", lambda *a: calls.append(1) or real(*a))
    save(tiny, tmp_path, experts="packed")
    assert len(calls) == 8 * 16 * 3


def test_unpacking_while_saving(packed, read, folder_of, tmp_path):
    save(packed, tmp_path, experts="dense", dtype=torch.bfloat16)
    stored, before = read(tmp_path), read(folder_of("k3-tiny-mxfp4"))
    name = "language_model.model.layers.2.block_sparse_moe.experts.5.w2.weight"
    assert torch.equal(stored[name], dequantize_mxfp4(before[f"{name}_packed"], before[f"{name}_scale"]))
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    assert not any(n.endswith(("_packed", "_scale")) for n in stored)


def test_packed_codes_are_copied(packed, read, equal, folder_of, tmp_path):
    save(packed, tmp_path, experts="packed", mode="ceil")
    assert equal(read(tmp_path), read(folder_of("k3-tiny-mxfp4")))


def test_widths_that_cannot_be_packed(tmp_path):
    config = preset("nano", vocab_size=128).replace_text(moe_intermediate_size=40)
    with pytest.raises(UserError, match=r"experts\.0\.w2 is .*groups of 32"):
        save(K3ForCausalLM(config).init_weights(), tmp_path / "new", experts="packed")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("options", [{"layout": "stacked"}, {"experts": "sparse"}, {"max_shard_bytes": 0}])
def test_bad_options(tiny, tmp_path, options):
    with pytest.raises(UserError, match=next(iter(options))):
        save(tiny, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_a_model_that_is_not_its_config_is_not_written(tmp_path, folder_of):
    model = load(folder_of("k3-tiny"))
    model.register_buffer("stray", torch.zeros(1))
    with pytest.raises(ValueError, match="stray"):
        save(model, tmp_path)


def test_compiled_and_checkpointed_models_are_written_without_their_wrappers(folder_of, read, equal, tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = load(folder_of("k3-tiny"))
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    model.model.layers[1] = torch.compile(model.model.layers[1])
    save(torch.compile(model), tmp_path)
    assert equal(read(tmp_path), read(folder_of("k3-tiny")))


# Replacing a checkpoint ---------------------------------------------------------------------------------------------------------------

KINDS = {"single": 10**9, "shards": 40_000, "fewer shards": 70_000}


@pytest.fixture(scope="module")
def specks() -> tuple[K3ForCausalLM, K3ForCausalLM]:
    """Two models of one shape and other values, small enough to be saved a hundred times."""
    config = preset("dense-nano", vocab_size=64).replace_text(num_hidden_layers=2, hidden_size=16, intermediate_size=32)
    return K3ForCausalLM(config).init_weights(seed=1), K3ForCausalLM(config).init_weights(seed=2)


@pytest.mark.parametrize("old", KINDS)
@pytest.mark.parametrize("new", KINDS)
def test_the_new_checkpoint_replaces_the_old(specks, tmp_path, old, new):
    save(specks[0], tmp_path, max_shard_bytes=KINDS[old])
    (tmp_path / "tokenizer.json").write_text("kept")
    save(specks[1], tmp_path, max_shard_bytes=KINDS[new])
    assert same_state(load(tmp_path), specks[1])
    assert (tmp_path / "tokenizer.json").read_text() == "kept"
    index = tmp_path / "model.safetensors.index.json"
    weights = {path.name for path in tmp_path.glob("*.safetensors")}
    assert weights == (set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"})


@pytest.mark.parametrize("old", KINDS)
@pytest.mark.parametrize("new", KINDS)
def test_a_kill_between_renames_leaves_a_whole_checkpoint(specks, tmp_path, monkeypatch, old, new):
    """Stopped dead before any rename or removal, with nothing cleaned up, the weights are the old ones or the new ones, never a mixture."""
    step, killed = 0, True
    while killed:
        folder = tmp_path / str(step)
        save(specks[0], folder, max_shard_bytes=KINDS[old])
        killed = save_and_die(specks[1], folder, KINDS[new], step, monkeypatch)
        found = load(folder)
        assert same_state(found, specks[0]) or same_state(found, specks[1])
        save(specks[1], folder, max_shard_bytes=KINDS[new])
        assert same_state(load(folder), specks[1]) and ASIDE not in listing(folder)
        step += 1
    assert step > 2


def save_and_die(model, folder, limit, step, monkeypatch) -> bool:
    """Saves, and dies before the change number `step` of the folder itself; False where there are fewer."""

    class Killed(BaseException):
        pass

    left = iter(range(step))

    def dying(real):
        def call(*args, **kwargs):
            if not all(ASIDE in str(arg) for arg in args) and next(left, None) is None:
                raise Killed
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(writer_module.os, "replace", dying(os.replace))
        patch.setattr(writer_module.Path, "unlink", dying(writer_module.Path.unlink))
        patch.setattr(writer_module.shutil, "rmtree", lambda *args, **kwargs: None)
        try:
            save(model, folder, max_shard_bytes=limit)
        except Killed:
            return True
    return False


class FullDisk:
    """Stands in for the file that `Path.open` gives; the write that passes `room` bytes fails as a full disk does."""

    def __init__(self, real, room):
        self.real, self.room = real, room

    def __enter__(self):
        self.real.__enter__()
        return self

    def __exit__(self, *args):
        return self.real.__exit__(*args)

    def write(self, data):
        self.room[0] -= len(data)
        if self.room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.real.write(data)

    def __getattr__(self, name):
        return getattr(self.real, name)


def full_disk(monkeypatch, room):
    real, left = writer_module.Path.open, [room]

    def open_(self, mode="r", *args, **kwargs):
        file = real(self, mode, *args, **kwargs)
        return FullDisk(file, left) if mode == "wb" else file

    monkeypatch.setattr(writer_module.Path, "open", open_)


@pytest.mark.parametrize("room", [0, 100_000, 1_000_000])
@pytest.mark.parametrize("limit", [10**9, 300_000])
def test_full_disk_leaves_the_old_checkpoint_whole(tiny, packed, tmp_path, monkeypatch, room, limit):
    save(tiny, tmp_path, max_shard_bytes=300_000)
    before = contents(tmp_path)
    full_disk(monkeypatch, room)
    with pytest.raises(UserError, match=r"disk full: saving needs .* GB") as caught:
        save(packed, tmp_path, max_shard_bytes=limit)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    monkeypatch.undo()
    assert contents(tmp_path) == before


def test_full_disk_leaves_no_new_folder(tiny, tmp_path, monkeypatch):
    full_disk(monkeypatch, 100_000)
    with pytest.raises(UserError, match="disk full"):
        save(tiny, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("where", ["00003-of-", "config.json", "index"])
def test_failing_rename_leaves_the_old_checkpoint_whole(tiny, packed, tmp_path, monkeypatch, where):
    save(tiny, tmp_path, max_shard_bytes=300_000)
    before, real = contents(tmp_path), os.replace

    def refuse(source, target):
        if where in str(target) and ASIDE not in str(target):
            monkeypatch.undo()
            raise OSError(errno.EIO, "Input/output error", str(target))
        real(source, target)

    monkeypatch.setattr(writer_module.os, "replace", refuse)
    with pytest.raises(UserError, match="can't save: Input/output error"):
        save(packed, tmp_path, max_shard_bytes=300_000)
    assert contents(tmp_path) == before


def test_place_that_cannot_be_written(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        save(tiny, tmp_path / "file" / "under")
    with pytest.raises(UserError, match="file"):
        save(tiny, tmp_path / "file")


def test_what_a_killed_save_left_is_cleared(tiny, tmp_path):
    (tmp_path / ASIDE).mkdir()
    (tmp_path / ASIDE / "model.safetensors").write_text("half")
    save(tiny, tmp_path)
    assert listing(tmp_path) == ["config.json", "model.safetensors"]


def test_saving_over_the_folder_it_came_from(folder_of, tmp_path):
    shutil.copytree(folder_of("k3-tiny"), tmp_path / "run", copy_function=shutil.copyfile)
    model = load(tmp_path / "run")
    save(model, tmp_path / "run")
    assert same_state(load(tmp_path / "run"), model)
