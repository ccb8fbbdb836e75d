"""`convert`: exact where it can be, one tensor at a time, all or nothing."""

import errno

import pytest
import torch

from openk3.checkpoint import load
from openk3.checkpoint import writer as writer_module
from openk3.checkpoint.audit import audit
from openk3.checkpoint.convert import convert
from openk3.checkpoint.names import keeps_float32
from openk3.checkpoint.reader import Reader
from openk3.config import K3Config
from openk3.errors import UserError
from openk3.ops.mx import dequantize_mxfp4, quantize_mxfp4

LAYER = "language_model.model.layers."


def experts(tensors):
    return {name: value for name, value in tensors.items() if ".experts." in name}


def test_unpacking_is_exact(folder_of, read, tmp_path):
    before = read(folder_of("k3-tiny-mxfp4"))
    after = read(convert(folder_of("k3-tiny-mxfp4"), tmp_path / "bf16", to="bf16"))
    for name, value in after.items():
        if name in experts(after):
            assert torch.equal(value, dequantize_mxfp4(before[f"{name}_packed"], before[f"{name}_scale"]))
        elif keeps_float32(name):
            assert value.dtype == torch.float32 and torch.equal(value, before[name])
        else:
            assert torch.equal(value, before[name].bfloat16()) and value.dtype == torch.bfloat16
    config = K3Config.load(tmp_path / "bf16")
    assert not config.quantized and config.dtype == "bfloat16" and audit(tmp_path / "bf16").ok and not audit(tmp_path / "bf16").notes


@pytest.mark.parametrize("mode", ["even", "ceil"])
def test_packing(folder_of, read, tmp_path, mode):
    before = read(folder_of("k3-tiny"))
    after = read(convert(folder_of("k3-tiny"), tmp_path / "packed", to="mxfp4", mode=mode))
    for name, value in before.items():
        if name in experts(before):
            codes, scale = quantize_mxfp4(value, mode)
            assert torch.equal(after[f"{name}_packed"], codes) and torch.equal(after[f"{name}_scale"], scale) and name not in after
        else:
            assert after[name].dtype == value.dtype and torch.equal(after[name], value)
    assert K3Config.load(tmp_path / "packed").quantized and audit(tmp_path / "packed").ok and not audit(tmp_path / "packed").notes


@pytest.mark.parametrize("mode", ["even", "rceil"])
def test_packed_values_survive_unpacking_and_packing(folder_of, read, equal, tmp_path, mode):
    """From a checkpoint that the same mode packed, even the codes come back; values come back for all but ceil."""
    first = convert(folder_of("k3-tiny"), tmp_path / "1", to="mxfp4", mode=mode)
    second = convert(convert(first, tmp_path / "2", to="bf16"), tmp_path / "3", to="mxfp4", mode=mode)
    values = [read(convert(folder, tmp_path / f"{folder.name}v", to="bf16")) for folder in (first, second)]
    assert equal(experts(values[0]), experts(values[1]))
    if mode == "even":  # every block's largest is 4 or 6
        assert equal(experts(read(first)), experts(read(second)))


@pytest.mark.parametrize("mode", ["even", "ceil"])
def test_packed_codes_are_copied_never_requantised(folder_of, read, equal, tmp_path, mode, monkeypatch):
    monkeypatch.setattr(writer_module, "quantize_mxfp4", lambda *a: pytest.fail("quantised again"))
    copy = convert(folder_of("k3-tiny-mxfp4"), tmp_path / "copy", to="mxfp4", mode=mode)
    assert equal(read(copy), read(folder_of("k3-tiny-mxfp4"))) and K3Config.load(copy) == K3Config.load(folder_of("k3-tiny-mxfp4"))


def test_the_converted_model_computes_the_same(folder_of, golden, tmp_path):
    """Unpacked on the disk equals unpacked in memory."""
    ids = golden("k3-tiny-mxfp4")["input_ids"][:, :8]
    with torch.no_grad():
        want = load(folder_of("k3-tiny-mxfp4"), experts="dense", dtype=torch.bfloat16)(ids).logits
        got = load(convert(folder_of("k3-tiny-mxfp4"), tmp_path / "bf16", to="bf16"))(ids).logits
    assert torch.equal(want, got)


@pytest.mark.parametrize("to", ["bf16", "mxfp4"])
def test_vision_tensors_come_along(folder_of, read, tmp_path, to):
    before, after = read(folder_of("k3-tiny-vision")), read(convert(folder_of("k3-tiny-vision"), tmp_path / "v", to=to))
    vision = [name for name in before if name.startswith(("vision_tower.", "mm_projector."))]
    assert len(vision) == 18 and all(torch.equal(after[name], before[name].to(after[name].dtype)) for name in vision)
    assert K3Config.load(tmp_path / "v").vision_config is not None and audit(tmp_path / "v").ok


def test_early_spellings_become_the_released_ones(edited, folder_of, read, equal, tmp_path):
    def age(t):
        t[f"{LAYER}0.self_attn.A_log"] = t[f"{LAYER}0.self_attn.A_log"][:6].view(1, 1, 6, 1).clone()
        t["language_model.layers.1.mlp_res.proj_weight"] = t.pop(f"{LAYER}1.mlp_res_proj.weight")[0].clone()

    again = read(convert(edited("k3-tiny-mxfp4", age), tmp_path / "again", to="mxfp4"))
    assert equal(again, read(folder_of("k3-tiny-mxfp4")))


def test_shards_in_and_out(edited, folder_of, read, equal, tmp_path):
    many = convert(edited("k3-tiny", shards=5), tmp_path / "many", to="mxfp4", max_shard_bytes=200_000)
    one = convert(folder_of("k3-tiny"), tmp_path / "one", to="mxfp4")
    assert equal(read(many), read(one)) and len(list(many.glob("model-*-of-*.safetensors"))) > 5


def test_one_matrix_at_a_time(folder_of, tmp_path, monkeypatch):
    """Between two tensors nothing of the first is kept but the other half of a packed pair."""
    alive, most = [], []
    real = writer_module.PackOnce.take

    def take(self, kind):
        value = real(self, kind)
        alive.append(self)
        most.append(sum(bool(once.kept) for once in alive))
        return value

    monkeypatch.setattr(writer_module.PackOnce, "take", take)
    convert(folder_of("k3-tiny"), tmp_path / "packed", to="mxfp4")
    assert max(most) == 1 and len(most) == 8 * 16 * 3 * 2


def test_progress_reaches_the_whole(folder_of, tmp_path):
    seen = []
    convert(folder_of("k3-tiny"), tmp_path / "bf16", to="bf16", max_shard_bytes=300_000, progress=lambda *done: seen.append(done))
    total = sum(t.nbytes for t in Reader(tmp_path / "bf16").tensors.values())
    assert seen[-1] == (total, total) and all(a[0] < b[0] for a, b in zip(seen, seen[1:], strict=False)) and len(seen) == 618


def test_companion_files_come_along(edited, tmp_path):
    folder = edited("k3-tiny", shards=2)
    (folder / "tokenizer.json").write_text("{}")
    (folder / ".hidden").write_text("")
    (folder / "resume").mkdir()
    target = convert(folder, tmp_path / "out", to="bf16")
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_folder_with_a_checkpoint_is_no_target(edited, folder_of, tmp_path):
    folder = edited("k3-tiny", shards=2)
    for target in (folder, folder / ".." / folder.name, folder_of("k3-tiny-mxfp4")):
        with pytest.raises(UserError, match="already holds a checkpoint"):
            convert(folder, target, to="bf16")


def test_source_must_be_whole(edited, tmp_path):
    folder = edited("k3-tiny", lambda t: t.pop("language_model.model.norm.weight"))
    with pytest.raises(UserError, match="1 tensor missing: language_model.model.norm.weight"):
        convert(folder, tmp_path / "out", to="bf16")
    assert not (tmp_path / "out").exists()


def test_dirty_padding_is_refused(edited, tmp_path):
    folder = edited("k3-tiny", lambda t: t[f"{LAYER}2.self_attn.A_log"][6:8].fill_(1.0))
    with pytest.raises(UserError, match="isn't zero after its 6 heads"):
        convert(folder, tmp_path / "out", to="bf16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"to": "int4"}, {"to": "mxfp4", "mode": "nearest"}])
def test_bad_options(folder_of, tmp_path, options):
    with pytest.raises(UserError, match=list(options.values())[-1]):
        convert(folder_of("k3-tiny"), tmp_path / "out", **options)


def test_full_disk_leaves_the_target_as_it_was(folder_of, tmp_path, monkeypatch):
    target = tmp_path / "out"
    target.mkdir()
    (target / "config.json").write_text("mine")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer_module.os, "fsync", full)
    with pytest.raises(UserError, match="disk full: saving needs"):
        convert(folder_of("k3-tiny"), target, to="bf16")
    assert [path.read_text() for path in target.iterdir()] == ["mine"]
