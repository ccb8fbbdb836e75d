"""`audit`: totals by component, what `load` would refuse, and what only the values tell."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from openk3.checkpoint import load
from openk3.checkpoint.audit import audit
from openk3.checkpoint.expected import expected_tensors
from openk3.config import K3Config
from openk3.errors import UserError
from openk3.ops.mx import MODES, quantize_mxfp4

K3_CONFIG = Path(__file__).parent.parent / "golden" / "k3-config.json"
LAYER = "language_model.model.layers."


@pytest.mark.parametrize("name", ["k3-tiny", "k3-tiny-mxfp4"])
@pytest.mark.parametrize("full", [False, True])
def test_a_whole_checkpoint_has_no_problems(folder_of, name, full):
    found = audit(folder_of(name), full=full)
    assert found.ok and not found.notes and [file.name for file in found.files] == ["model.safetensors"]
    assert found.tensors.keys() == expected_tensors(found.config).keys()
    assert found.nbytes == sum(t.nbytes for t in found.tensors.values()) < (folder_of(name) / "model.safetensors").stat().st_size


def test_totals(folder_of):
    """Weights by component equal the config's own count; A_log's padding and the scales are the only difference."""
    found = audit(folder_of("k3-tiny-mxfp4"))
    heads, kda_layers = 6, 6
    assert found.elements == found.config.parameter_count().total + kda_layers * (128 - heads)
    groups = {group.name: group for group in found.groups}
    assert groups["routed experts"].elements == 8 * 12 * 3 * 96 * 64 and groups["routed experts"].tensors == 8 * 12 * 3 * 2
    assert groups["routed experts"].nbytes == 8 * 12 * 3 * (96 * 64 // 2 + 96 * 64 // 32)
    assert groups["embedding"].elements == groups["lm_head"].elements == 264 * 64
    assert set(groups) == {
        "attention", "attention residuals", "dense feed-forward", "embedding", "latent projections", "lm_head", "norms", "routed experts",
        "routers", "shared experts",
    }  # fmt: skip
    assert found.dtypes == {"U8": 8 * 12 * 3 * 2, "F32": len(found.tensors) - 8 * 12 * 3 * 2}
    assert sum(group.tensors for group in found.groups) == len(found.tensors)


def test_vision_is_counted_and_noted(folder_of):
    found = audit(folder_of("k3-tiny-vision"))
    groups = {group.name: group for group in found.groups}
    assert found.ok and groups["vision tower"].tensors == 15 and groups["vision projector"].tensors == 3
    assert found.notes == ["18 vision tensors are here; a text-only model leaves them on the disk (text_only=True)"]


def test_headers_alone_are_read(folder_of, monkeypatch):
    monkeypatch.setattr("mmap.mmap", lambda *a, **k: pytest.fail("a file was mapped"))
    assert audit(folder_of("k3-tiny")).ok


def test_problems_are_those_that_load_gives(edited):
    def spoil(t):
        del t[f"{LAYER}4.block_sparse_moe.gate.e_score_correction_bias"]
        t["stray"] = torch.zeros(2)
        t[f"{LAYER}0.mlp_res_norm.weight"] = torch.ones(65)
        t["language_model.model.norm.weight"] = torch.ones(64, dtype=torch.int64)

    folder = edited("k3-tiny", spoil)
    found = audit(folder)
    assert not found.ok and len(found.problems) == 4
    for problem, words in zip(found.problems, ("missing", "unknown", "shape", "dtype"), strict=True):
        assert words in problem and problem.startswith("1 tensor")
    with pytest.raises(UserError) as caught:
        load(folder)
    assert all(problem in str(caught.value) for problem in found.problems)


def test_a_broken_shard_is_a_problem_and_the_others_are_listed(edited):
    folder = edited("k3-tiny", shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    found = audit(folder)
    assert shard.name in found.problems[0] and "copy it again" in found.problems[0]
    assert "tensors missing" in found.problems[1] and f"promised in {shard.name}" in found.problems[1]
    assert len(found.tensors) == 618 - 206


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(UserError, match="config.json"):
        audit(tmp_path)


def test_notes(edited):
    def age(t):
        t["language_model.norm.weight"] = t.pop("language_model.model.norm.weight")
        t[f"{LAYER}0.self_attn.dt_bias"] = t[f"{LAYER}0.self_attn.dt_bias"].bfloat16()

    found = audit(edited("k3-tiny-mxfp4", age, config=lambda c: c["text_config"].pop("quantization_config")))
    assert found.ok and len(found.notes) == 3
    assert "1 tensors have an early port's name, such as language_model.norm.weight" in found.notes[0]
    assert "stored in fewer bits" in found.notes[1] and "dt_bias" in found.notes[1]
    assert "doesn't say that experts are packed, 288 matrices are" in found.notes[2]


def test_values_are_looked_at_only_when_asked(edited):
    def spoil(t):
        t[f"{LAYER}0.self_attn.A_log"][100] = 1.0
        t[f"{LAYER}3.block_sparse_moe.experts.7.w2.weight_scale"][5, 1] = 255
        t["language_model.lm_head.weight"][3, :2] = torch.tensor([float("nan"), float("inf")])

    folder = edited("k3-tiny-mxfp4", spoil)
    assert audit(folder).ok
    problems = "\n".join(audit(folder, full=True).problems)
    assert problems.count("\n") == 2
    assert f"{LAYER}0.self_attn.A_log isn't zero after its 6 heads" in problems
    assert f"{LAYER}3.block_sparse_moe.experts.7.w2.weight_scale in model.safetensors has 1 scale bytes of 255" in problems
    assert "language_model.lm_head.weight in model.safetensors has 2 values that are NaN or infinite" in problems


@pytest.mark.parametrize("mode", MODES)
def test_block_maxima_tell_the_scale_mode(edited, mode):
    draw = torch.Generator().manual_seed(0)

    def requantise(t):
        for name in [name for name in t if name.endswith("weight_packed")]:
            rows, half = t[name].shape
            t[name], t[name.replace("_packed", "_scale")] = quantize_mxfp4(torch.randn(rows, 2 * half, generator=draw), mode)

    found = audit(edited("k3-tiny-mxfp4", requantise), full=True).block_max
    assert set(found) == {"floor": {4.0, 6.0}, "even": {4.0, 6.0}, "rceil": {3.0, 4.0, 6.0}, "ceil": {2.0, 3.0, 4.0}}[mode]
    assert sum(found.values()) == pytest.approx(1)


def test_dense_checkpoints_have_no_block_maxima(folder_of):
    assert audit(folder_of("k3-tiny"), full=True).block_max is None


def test_progress_counts_every_tensor(folder_of):
    seen = []
    audit(folder_of("k3-tiny"), full=True, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n + 1, 618) for n in range(618)]


@pytest.mark.slow
def test_k3_itself(tmp_path):
    """A folder with K3's whole inventory, 1.56 TB, as sparse files: headers alone are read, and the totals are the published ones."""
    shutil.copyfile(K3_CONFIG, tmp_path / "config.json")
    shards: dict[str, list] = {}
    for name, spec in expected_tensors(K3Config.load(tmp_path)).items():
        shards.setdefault(name.split(".")[3] if ".layers." in name else "rest", []).append((name, spec))
    for shard, tensors in shards.items():
        header, end = {}, 0
        for name, (shape, dtype) in tensors:
            size = math.prod(shape) * {"U8": 1, "BF16": 2, "F32": 4}[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        with (tmp_path / f"{shard}.safetensors").open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            f.truncate(8 + len(text) + end)
    where = {name: f"{shard}.safetensors" for shard, tensors in shards.items() for name, _ in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    found = audit(tmp_path)
    assert found.ok and len(found.tensors) == 497_220 and len(found.files) == 94
    assert found.nbytes == 1_560_860_324_864 and found.elements == 2_779_931_837_184
