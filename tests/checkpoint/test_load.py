"""Loading: values land where they belong, every variant of storage is understood, and each fault is one line that names it."""

import json
import os

import pytest
import torch

from openk3.checkpoint import load
from openk3.checkpoint.names import keeps_float32, split_stack
from openk3.checkpoint.reader import Reader
from openk3.errors import UserError
from openk3.ops.mx import dequantize_mxfp4, quantize_mxfp4

LAYER = "language_model.model.layers."
EXPERT = f"{LAYER}1.block_sparse_moe.experts.0.w1"


def fails(folder, *words, **options) -> str:
    """The message of the one line that loading ends in."""
    with pytest.raises(UserError) as caught:
        load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message
    return message


def check_values(model, stored):
    """Every tensor of the model against the file's, renamed here by hand."""
    for name, value in model.state_dict().items():
        stack = split_stack(name)
        if stack is None:
            want = stored[f"language_model.{name}"]
            assert torch.equal(value, want[: len(value)] if name.endswith("A_log") else want), name
        else:
            each = [stored[f"language_model.{stack[0]}.{e}.{stack[1]}.weight{stack[2]}"] for e in range(len(value))]
            assert torch.equal(value, torch.stack(each)), name


def test_golden_values(folder_of, read):
    model = load(folder_of("k3-tiny"))
    assert not model.training and not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert all(p.requires_grad for p in model.parameters())
    check_values(model, read(folder_of("k3-tiny")))


def test_packed_experts_stay_packed(folder_of, read):
    model = load(folder_of("k3-tiny-mxfp4"))
    stored = read(folder_of("k3-tiny-mxfp4"))
    assert type(model.model.layers[1].block_sparse_moe.experts).__name__ == "PackedExperts"
    check_values(model, stored)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_experts_unpack_exactly(folder_of, read, dtype):
    stored = read(folder_of("k3-tiny-mxfp4"))
    model = load(folder_of("k3-tiny-mxfp4"), experts="dense", dtype=dtype)
    for which in ("w1", "w2", "w3"):
        stack = getattr(model.model.layers[3].block_sparse_moe.experts, which)
        for e in range(len(stack)):
            name = f"{LAYER}3.block_sparse_moe.experts.{e}.{which}.weight"
            assert torch.equal(stack[e], dequantize_mxfp4(stored[f"{name}_packed"], stored[f"{name}_scale"], dtype))


def test_dense_experts_can_be_packed_while_loading(folder_of, read):
    stored = read(folder_of("k3-tiny"))
    experts = load(folder_of("k3-tiny"), experts="packed").model.layers[1].block_sparse_moe.experts
    for name, value in zip(("w1_packed", "w1_scale"), quantize_mxfp4(stored[f"{EXPERT}.weight"]), strict=True):
        assert torch.equal(getattr(experts, name)[0], value)


def test_names_decide_about_packing_not_the_config(folder_of, edited):
    quiet = edited("k3-tiny-mxfp4", config=lambda c: c["text_config"].pop("quantization_config"))
    assert hasattr(load(quiet).model.layers[1].block_sparse_moe.experts, "w1_packed")


def test_a_layer_of_both_kinds_is_dense(edited):
    def unpack_one(t):
        t[f"{EXPERT}.weight"] = dequantize_mxfp4(t.pop(f"{EXPERT}.weight_packed"), t.pop(f"{EXPERT}.weight_scale"), torch.float32)

    model = load(edited("k3-tiny-mxfp4", unpack_one))
    assert hasattr(model.model.layers[1].block_sparse_moe.experts, "w1")
    assert hasattr(model.model.layers[2].block_sparse_moe.experts, "w1_packed")


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", torch.float16])
def test_dtype_leaves_float32_tensors_alone(folder_of, read, dtype):
    stored = read(folder_of("k3-tiny"))
    model = load(folder_of("k3-tiny"), dtype=dtype)
    assert model.lm_head.weight.dtype == (torch.float16 if dtype == torch.float16 else torch.bfloat16)
    for name, value in model.state_dict().items():
        assert value.dtype == (torch.float32 if keeps_float32(name) else model.lm_head.weight.dtype), name
        if split_stack(name) is None and not keeps_float32(name):
            assert torch.equal(value, stored[f"language_model.{name}"].to(value.dtype))
    assert {name.rpartition("self_attn.")[2] for name in model.state_dict() if keeps_float32(name) and ".layers.0." in name} == {
        "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "A_log", "dt_bias", "o_norm.weight",
    }  # fmt: skip


def test_auto_dtype_is_the_stored_one(edited):
    def to_bf16(t):
        t.update({name: value.bfloat16() for name, value in t.items() if not keeps_float32(name)})

    model = load(edited("k3-tiny", to_bf16))
    assert model.lm_head.weight.dtype == torch.bfloat16 and model.model.layers[0].self_attn.dt_bias.dtype == torch.float32


def test_auto_dtype_of_a_mixture_is_the_widest(edited):
    def one(t):
        t["language_model.lm_head.weight"] = t["language_model.lm_head.weight"].bfloat16()

    assert {p.dtype for p in load(edited("k3-tiny", one)).parameters()} == {torch.float32}


def test_shards_equal_a_single_file(folder_of, edited):
    one, many = load(folder_of("k3-tiny")).state_dict(), load(edited("k3-tiny", shards=7)).state_dict()
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)


def test_what_is_loaded_outlives_the_file(edited):
    folder = edited("k3-tiny")
    model = load(folder)
    before = model.lm_head.weight.clone()
    with torch.no_grad():
        model.lm_head.weight.add_(1)  # the memory is the model's own
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(model.lm_head.weight, before + 1)


def test_early_ports_spellings_load(folder_of, edited):
    def respell(t):
        for name in list(t):
            new = name.replace("language_model.model.", "language_model.")
            for site in ("self_attention_res", "mlp_res", "output_attn_res"):
                for part in ("proj", "norm"):
                    new = new.replace(f"{site}_{part}.weight", f"{site}.{part}_weight")
            value = t.pop(name)
            if name.endswith("A_log"):
                value = value[:6].view(1, 1, 6, 1)
            t[new] = value[0] if name.endswith("_res_proj.weight") else value

    want, got = load(folder_of("k3-tiny")).state_dict(), load(edited("k3-tiny", respell)).state_dict()
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize("form", [lambda a: a[:6], lambda a: a[:6].view(1, 1, 6, 1), lambda a: a])
def test_a_log_forms(folder_of, edited, form):
    def reform(t):
        t[f"{LAYER}0.self_attn.A_log"] = form(t[f"{LAYER}0.self_attn.A_log"]).contiguous()

    a_log = load(edited("k3-tiny", reform)).model.layers[0].self_attn.A_log
    assert torch.equal(a_log, load(folder_of("k3-tiny")).model.layers[0].self_attn.A_log) and a_log.shape == (6,)


def test_a_log_padding_must_be_zero(edited):
    folder = edited("k3-tiny", lambda t: t[f"{LAYER}2.self_attn.A_log"][6:8].fill_(1e-8))
    fails(folder, f"{LAYER}2.self_attn.A_log", "model.safetensors", "6 heads")


def test_missing_tensor(edited):
    folder = edited("k3-tiny", lambda t: t.pop(f"{LAYER}4.block_sparse_moe.gate.e_score_correction_bias"))
    fails(folder, "1 tensor missing", f"{LAYER}4.block_sparse_moe.gate.e_score_correction_bias", "F32 [16]")


def test_long_lists_are_cut(edited):
    def drop_layer(t):
        for name in [name for name in t if name.startswith(f"{LAYER}1.block_sparse_moe.experts.")]:
            del t[name]

    message = fails(edited("k3-tiny", drop_layer), "48 tensors missing", "and 43 more")
    assert message.count(".block_sparse_moe.") == 5


def test_extra_tensor(edited):
    fails(edited("k3-tiny", lambda t: t.update({"model.layers.9.oops": torch.zeros(3)})), "1 tensor unknown", "oops", "model.safetensors")


def test_shape(edited):
    def transpose(t):
        t[f"{LAYER}0.self_attn.f_a_proj.weight"] = t[f"{LAYER}0.self_attn.f_a_proj.weight"].T.contiguous()

    fails(edited("k3-tiny", transpose, shards=2), "wrong shape", "f_a_proj.weight in model-0000", "is [64, 16], expected [16, 64]")


@pytest.mark.parametrize(("name", "dtype"), [("k3-tiny", torch.uint8), ("k3-tiny", torch.int32), ("k3-tiny", torch.float8_e4m3fn)])
def test_dtype_of_another_kind(edited, name, dtype):
    def cast(t):
        t["language_model.model.norm.weight"] = t["language_model.model.norm.weight"].to(dtype)

    fails(edited(name, cast), "wrong dtype", "language_model.model.norm.weight in model.safetensors", "expected F32")


def test_packed_codes_must_be_bytes(edited):
    def cast(t):
        t[f"{EXPERT}.weight_scale"] = t[f"{EXPERT}.weight_scale"].float()

    fails(edited("k3-tiny-mxfp4", cast), f"{EXPERT}.weight_scale in model.safetensors is F32, expected U8")


def test_packed_without_its_scale(edited):
    fails(edited("k3-tiny-mxfp4", lambda t: t.pop(f"{EXPERT}.weight_scale")), "1 tensor missing", f"{EXPERT}.weight_scale (U8 [64, 3]")


def test_matrix_stored_both_ways(edited):
    fails(edited("k3-tiny-mxfp4", lambda t: t.update({f"{EXPERT}.weight": torch.zeros(64, 96)})), "1 tensor unknown", f"{EXPERT}.weight in")


def test_one_tensor_under_two_names(edited):
    folder = edited("k3-tiny", lambda t: t.update({"language_model.norm.weight": torch.ones(64)}))
    fails(folder, "stored twice", "language_model.norm.weight", "language_model.model.norm.weight")


def test_another_models_config(edited):
    fails(edited("k3-tiny", config=lambda c: c["text_config"].update(vocab_size=300)), "lm_head.weight", "[264, 64], expected [300, 64]")


@pytest.mark.parametrize("keep", [0, 5, 100, 50_000, -1])
def test_truncated_file(edited, keep):
    file = edited("k3-tiny") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    fails(file.parent, "model.safetensors", "copy it again")


def test_trailing_bytes(edited):
    file = edited("k3-tiny") / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    fails(file.parent, "model.safetensors", "copy it again")


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1, 2]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_corrupt_header(edited, header):
    folder = edited("k3-tiny")
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    fails(folder, "model.safetensors", "corrupt safetensors header")


def test_missing_shard(edited):
    folder = edited("k3-tiny", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    fails(folder, "1 of 3 shards are missing", "model-00002-of-00003.safetensors")


def test_tensor_absent_from_its_promised_shard(edited):
    folder = edited("k3-tiny", lambda t: t.pop("language_model.model.norm.weight"), shards=3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["language_model.model.norm.weight"] = "model-00003-of-00003.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fails(folder, "language_model.model.norm.weight", "promised in model-00003-of-00003.safetensors")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_broken_index(edited, content):
    folder = edited("k3-tiny", shards=2)
    (folder / "model.safetensors.index.json").write_text(content)
    fails(folder, "model.safetensors.index.json", "not an index of shards")


def test_index_that_leaves_the_folder(edited):
    folder = edited("k3-tiny", shards=2)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    fails(folder, "isn't a file of this folder")


def test_no_checkpoint(edited, tmp_path):
    fails(tmp_path / "nowhere", "nowhere", "no such folder")
    folder = edited("k3-tiny", shards=2)
    (folder / "model.safetensors.index.json").unlink()
    fails(folder, "no model.safetensors", "model.safetensors.index.json is missing")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    fails(folder, "no model.safetensors and no model.safetensors.index.json")
    (folder / "config.json").unlink()
    fails(folder, "config.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(edited):
    folder = edited("k3-tiny")
    (folder / "model.safetensors").chmod(0)
    fails(folder, "model.safetensors", "can't read it")


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"dtype": torch.int32}, {"dtype": "flaot32"}, {"experts": "sparse"}])
def test_bad_options(folder_of, options):
    fails(folder_of("k3-tiny"), *options.values() if isinstance(next(iter(options.values())), str) else ["dtype"], **options)


def test_vision_tensors_are_left_on_the_disk_when_told(folder_of):
    model = load(folder_of("k3-tiny-vision"), text_only=True)
    assert model.config.vision_config is None and len(model.model.layers) == 5
    assert not any("vision" in name for name in model.state_dict())


def test_vision_tensors_are_never_dropped_silently(folder_of):
    fails(folder_of("k3-tiny-vision"), "vision tower", "text_only=True")


def test_text_only_does_not_excuse_text_tensors(edited):
    def spoil(t):
        del t["mm_projector.post_norm.weight"], t["language_model.model.norm.weight"]

    folder = edited("k3-tiny-vision", spoil)
    fails(folder, "2 tensors missing", "mm_projector.post_norm.weight", "language_model.model.norm.weight")
    assert "mm_projector" not in fails(folder, "1 tensor missing", "language_model.model.norm.weight", text_only=True)


def test_reading_is_lazy(folder_of):
    """Opening a folder maps nothing; a tensor maps its own file."""
    reader = Reader(folder_of("k3-tiny"))
    assert not reader._maps and len(reader.tensors) == 618
    assert reader.read("language_model.model.norm.weight").shape == (64,) and len(reader._maps) == 1


def test_a_shard_larger_than_the_memory_can_be_mapped(edited):
    """A sparse file of 2 TB beside the real one: a writable map of it would be refused."""
    folder = edited("k3-tiny", shards=2)
    size = 2 * 10**12
    header = json.dumps({"huge": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    with (folder / "huge.safetensors").open("wb") as f:
        f.write(len(header).to_bytes(8, "little") + header)
        f.truncate(8 + len(header) + size)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["huge"] = "huge.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not Reader(folder).read("language_model.huge")[-3:].any()
