"""The MXFP4 codec: the code table, rounding, each scale mode's promise, and byte-for-byte agreement with stored experts."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from openk3.ops import mx
from openk3.ops.mx import GROUP, MODES, dequantize_mxfp4, quantize_mxfp4

GOLDEN = Path(__file__).parent.parent / "golden"
TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def pack(codes: list[int]) -> torch.Tensor:
    return torch.tensor([low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)], dtype=torch.uint8)


def block(*values: float) -> torch.Tensor:
    return torch.tensor([*values, *[0.0] * (GROUP - len(values))])


def gaussian(*shape: int, seed: int = 0, spread: int = 20) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-spread, spread + 1, (*shape[:-1], shape[-1] // GROUP, 1), generator=draw).float()
    return (torch.randn(*shape[:-1], shape[-1] // GROUP, GROUP, generator=draw) * torch.exp2(exponent)).flatten(-2)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.float().view(torch.int32)  # tells −0 from 0


def test_code_table():
    got = dequantize_mxfp4(pack(list(range(16)) * 2), torch.tensor([127], dtype=torch.uint8), torch.float32)
    assert torch.equal(bits(got), bits(torch.tensor(TABLE * 2)))


def test_low_nibble_is_the_even_column():
    packed = torch.full((16,), 0x1A, dtype=torch.uint8)
    got = dequantize_mxfp4(packed, torch.tensor([127], dtype=torch.uint8))
    assert got[:2].tolist() == [-1.0, 0.5] and got.dtype == torch.bfloat16


def test_groups_run_along_the_last_axis():
    w = torch.stack([torch.cat([block(6.0), block(12.0)]), torch.cat([block(0.75), block(-96.0)])])  # [2, 64]
    packed, scale = quantize_mxfp4(w)
    assert scale.tolist() == [[127, 128], [124, 131]] and packed.shape == (2, 32)
    assert torch.equal(dequantize_mxfp4(packed, scale, torch.float32), w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_code_at_every_scale_is_exact(dtype):
    """Scale bytes 0 (2^−127, subnormal) to 252; above, 6·2^(e−127) leaves the range of float32 and bfloat16."""
    scale = torch.arange(253, dtype=torch.uint8).unsqueeze(1)
    got = dequantize_mxfp4(pack(list(range(16)) * 2).expand(253, -1), scale, dtype)
    want = torch.tensor(TABLE * 2, dtype=torch.float64) * torch.exp2(torch.arange(253, dtype=torch.float64) - 127).unsqueeze(1)
    assert torch.equal(got.double(), want)


@pytest.mark.parametrize("mode", ["floor", "even", "rceil"])
def test_codes_survive_a_round_trip_when_the_block_reaches_its_scale(mode):
    """Every code at every scale byte, in a block whose largest magnitude is 4 or 6."""
    for top in (6, 7):  # the codes of 4 and 6
        codes = [c if c & 7 <= top else top for c in range(16)]
        packed = pack(codes * 2).expand(253, -1).contiguous()
        scale = torch.arange(253, dtype=torch.uint8).unsqueeze(1)
        again, scale_again = quantize_mxfp4(dequantize_mxfp4(packed, scale, torch.float32), mode)
        assert torch.equal(again, packed) and torch.equal(scale_again, scale)


@pytest.mark.parametrize("mode", ["floor", "even", "rceil"])
def test_values_survive_a_round_trip_always(mode):
    draw = torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (500, 16), generator=draw, dtype=torch.uint8) & 0x9B  # magnitudes of at most 1.5 and 3
    scale = torch.randint(3, 253, (500, 1), generator=draw, dtype=torch.uint8)
    values = dequantize_mxfp4(packed, scale)
    assert torch.equal(dequantize_mxfp4(*quantize_mxfp4(values, mode)), values)


def test_ceil_loses_a_bit_on_its_own_output():
    """Why stored experts are re-encoded by copying their codes."""
    values = dequantize_mxfp4(pack([7, 3] + [0] * 30), torch.tensor([127], dtype=torch.uint8))
    assert not torch.equal(dequantize_mxfp4(*quantize_mxfp4(values, "ceil")), values)


@pytest.mark.parametrize(
    ("value", "want"),
    [(0.25, 0), (0.2500001, 0.5), (0.75, 1), (0.7499999, 0.5), (1.25, 1), (1.2500001, 1.5), (1.75, 2), (1.7499999, 1.5), (2.5, 2)]
    + [(2.5000002, 3), (3.5, 4), (3.4999998, 3), (5.0, 4), (5.0000005, 6), (6.5, 6), (6.9, 6)],
)
def test_ties_go_to_the_even_code(value, want):
    """Scale 1 throughout: the block's largest is 6 (or the value itself, under 7)."""
    w = block(value, -value, 6.0)
    packed, scale = quantize_mxfp4(w, "even")
    assert scale.item() == 127
    assert dequantize_mxfp4(packed, scale, torch.float32)[:2].tolist() == [want, -want]


@pytest.mark.parametrize(
    ("mode", "amax", "exponent"),
    [("floor", 4.0, 0), ("floor", 6.0, 0), ("floor", 7.999, 0), ("floor", 8.0, 1)]
    + [("even", 6.0, 0), ("even", 6.999, 0), ("even", 7.0, 1), ("even", 8.0, 1)]
    + [("rceil", 6.0, 0), ("rceil", 6.0000005, 1), ("rceil", 8.0, 1), ("rceil", 12.0, 1)]
    + [("ceil", 4.0, 0), ("ceil", 4.0000005, 1), ("ceil", 8.0, 1), ("ceil", 6.0, 1)],
)
def test_scale_exponents(mode, amax, exponent):
    for power in (-60, 0, 60):
        _, scale = quantize_mxfp4(block(-amax, 0.1) * 2.0**power, mode)
        assert scale.item() - 127 == exponent + power


@pytest.mark.parametrize(("mode", "most"), [("floor", 8.0), ("even", 7.0), ("rceil", 6.0), ("ceil", 4.0)])
@given(seed=st.integers(0, 2**32), spread=st.integers(0, 110))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_how_far_above_the_scale_each_mode_lets_a_block_reach(mode, most, seed, spread):
    """floor and even saturate values between 6 and their bound; rceil and ceil never saturate. None wastes more than its share."""
    w = gaussian(16, 64, seed=seed, spread=spread)
    packed, scale = quantize_mxfp4(w, mode)
    x = torch.exp2(scale.double() - 127)
    ratio = w.double().unflatten(-1, (-1, GROUP)).abs().amax(-1) / x
    assert (ratio <= most).all() and (most in (4.0, 6.0) or (ratio < most).all())
    assert (ratio > {"floor": 3.999, "even": 3.499, "rceil": 3.0, "ceil": 2.0}[mode]).all()


@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(0, 2**32), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_error_is_half_a_step_at_most(mode, seed, dtype):
    w = gaussian(8, 96, seed=seed).to(dtype)
    packed, scale = quantize_mxfp4(w, mode)
    x = torch.exp2(scale.double() - 127).repeat_interleave(GROUP, -1)
    ratio = w.double().abs() / x
    error = (dequantize_mxfp4(packed, scale, torch.float64) - w.double()).abs() / x
    step = torch.where(ratio < 2, 0.5, torch.where(ratio < 4, 1.0, 2.0))
    bound = torch.where(ratio > 6, ratio - 6, step / 2)  # saturated: the distance to 6
    assert (error <= bound * (1 + 1e-6)).all()


def test_relative_error_on_gaussian_blocks():
    """The modes' order, and their levels averaged over an octave of widths: even loses least, ceil most."""
    draw = torch.Generator().manual_seed(0)
    w = torch.randn(8192, 64, generator=draw) * torch.exp2(torch.rand(8192, 1, generator=draw))
    error = {m: ((dequantize_mxfp4(*quantize_mxfp4(w, m), torch.float32) - w).norm() / w.norm()).item() for m in MODES}
    assert sorted(MODES, key=error.get) == ["even", "floor", "rceil", "ceil"]
    assert error == pytest.approx({"floor": 0.116, "even": 0.1125, "rceil": 0.117, "ceil": 0.1415}, abs=0.002)


def test_zero_block_has_zero_codes():
    packed, scale = quantize_mxfp4(torch.cat([block(), -block(), block(1.0)]))
    assert packed[:32].count_nonzero() == 0 and scale[2] != 255
    assert torch.equal(bits(dequantize_mxfp4(packed, scale)[:64]), torch.zeros(64, dtype=torch.int32))


def test_negative_zero_keeps_its_sign():
    packed, scale = quantize_mxfp4(block(4.0, -0.0, -1e-6))
    assert torch.equal(dequantize_mxfp4(packed, scale)[1:3].signbit(), torch.tensor([True, True]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("mode", MODES)
def test_non_finite_block_is_nan_and_its_neighbours_are_not(bad, mode):
    w = torch.cat([block(1.0, 2.0), block(1.0, bad), block(3.0)])
    packed, scale = quantize_mxfp4(w, mode)
    back = dequantize_mxfp4(packed, scale).view(3, GROUP)
    assert (scale == 255).tolist() == [False, True, False]
    assert back[1].isnan().all() and back[::2].isfinite().all()


@pytest.mark.parametrize("mode", MODES)
def test_smallest_and_largest_floats(mode):
    tiny = torch.tensor([2.0**-149, 2.0**-127, 2.0**-126, 2.0**-125])
    packed, scale = quantize_mxfp4(block(*tiny), mode)
    assert scale.item() == 0 and torch.equal(dequantize_mxfp4(packed, scale, torch.float32)[1:4], tiny[1:])
    huge = 3.0 * 2.0**126
    packed, scale = quantize_mxfp4(block(huge, -huge), mode)
    assert scale.item() < 255 and dequantize_mxfp4(packed, scale, torch.float32)[:2].tolist() == [huge, -huge]


def test_pieces_are_one_tensor(monkeypatch):
    """Any cut of the work gives the same bytes, and stacks and slices quantise alike."""
    w = gaussian(5, 7, 96)
    whole = quantize_mxfp4(w)
    monkeypatch.setitem(mx._CHUNK, "cpu", 200)
    cut = quantize_mxfp4(w)
    each = [torch.stack(part) for part in zip(*(quantize_mxfp4(e) for e in w), strict=True)]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(whole, cut, each, strict=True))
    assert torch.equal(dequantize_mxfp4(*cut), torch.stack([dequantize_mxfp4(*pair) for pair in zip(*whole, strict=True)]))


def test_views_and_out():
    w = gaussian(64, 96)
    packed, scale = quantize_mxfp4(w.T.contiguous().T)
    assert torch.equal(packed, quantize_mxfp4(w)[0])
    out = torch.empty(3, 64, 96, dtype=torch.bfloat16)
    assert dequantize_mxfp4(packed, scale, out=out[1]).data_ptr() == out[1].data_ptr()
    assert torch.equal(out[1], dequantize_mxfp4(packed, scale))


def test_gradients_stay_outside():
    w = gaussian(2, 32).requires_grad_()
    assert not any(t.requires_grad for t in quantize_mxfp4(w))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantize_mxfp4(torch.zeros(2, 48)), "multiple of 32"),
        (lambda: quantize_mxfp4(torch.zeros(2, 0)), "multiple of 32"),
        (lambda: quantize_mxfp4(torch.zeros(())), "multiple of 32"),
        (lambda: quantize_mxfp4(torch.zeros(2, 32), "nearest"), "floor, even, rceil, ceil"),
        (lambda: quantize_mxfp4(torch.zeros(2, 32, dtype=torch.int32)), "int32"),
        (lambda: dequantize_mxfp4(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)), "don't belong"),
        (lambda: dequantize_mxfp4(torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 0, dtype=torch.uint8)), "don't belong"),
        (lambda: dequantize_mxfp4(torch.zeros(2, 16), torch.zeros(2, 1)), "uint8"),
        (lambda: dequantize_mxfp4(*quantize_mxfp4(torch.zeros(2, 32)), out=torch.zeros(2, 16)), "out has shape"),
    ],
)
def test_errors(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_mode_names_may_be_capital():
    assert torch.equal(quantize_mxfp4(gaussian(2, 32), "RCEIL")[1], quantize_mxfp4(gaussian(2, 32), "rceil")[1])


def test_golden_experts():
    """Each stored expert: the table by hand gives the values, and quantising them gives the stored bytes back where the block allows it."""
    stored = load_file(GOLDEN / "k3-tiny-mxfp4" / "model.safetensors")
    names = [name.removesuffix("_packed") for name in stored if name.endswith(".weight_packed")]
    assert len(names) == 8 * 12 * 3
    table = torch.tensor(TABLE)
    for name in names:
        packed, scale = stored[f"{name}_packed"], stored[f"{name}_scale"]
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
        want = table[codes] * torch.exp2(scale.float() - 127).repeat_interleave(GROUP, -1)
        values = dequantize_mxfp4(packed, scale)
        assert torch.equal(values.float(), want)
        full = (codes & 7).unflatten(-1, (-1, GROUP)).amax(-1) >= 6
        again, scale_again = quantize_mxfp4(values)
        assert torch.equal(dequantize_mxfp4(again, scale_again), values)
        assert torch.equal(scale_again[full], scale[full])
        assert torch.equal(again.unflatten(-1, (-1, 16))[full], packed.unflatten(-1, (-1, 16))[full])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_equal_to_torchao(mode, dtype):
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao, an optional oracle, isn't installed")
    w = gaussian(64, 256).to(dtype)
    w[0, :32], w[1], w[2, 5] = 0.0, torch.linspace(-8, 8, 256), -0.0
    scale, data = mx_tensor.to_mx(w, torch.float4_e2m1fn_x2, GROUP, mx_tensor.ScaleCalculationMode[mode.upper()])
    packed, ours = quantize_mxfp4(w, mode)
    assert torch.equal(data.view(torch.uint8), packed) and torch.equal(scale.view(torch.uint8), ours)


def test_equal_to_compressed_tensors():
    reason = "compressed-tensors, an optional oracle, isn't installed"
    scales = pytest.importorskip("compressed_tensors.quantization.utils.mxfp_utils", reason=reason)
    codes = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers", reason=reason)
    w = gaussian(64, 256)
    packed, scale = quantize_mxfp4(w, "even")
    assert torch.equal(scales.generate_mx_scales(w.unflatten(-1, (-1, GROUP)).abs().amax(-1)).to(torch.uint8), scale)
    unpacked = codes.unpack_fp4_from_uint8(packed, 64, 256, dtype=torch.float32)
    values = unpacked * torch.exp2(scale.float() - 127).repeat_interleave(GROUP, -1)
    assert torch.equal(values, dequantize_mxfp4(packed, scale, torch.float32))
    assert torch.equal(codes.pack_fp4_to_uint8(unpacked), packed)
