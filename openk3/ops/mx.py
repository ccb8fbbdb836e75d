"""MXFP4, the format of the released routed experts: 4-bit E2M1 elements with one power-of-two scale for each 32 input columns.

    w[o, c] = E2M1(code[o, c]) · 2^(scale[o, c // 32] − 127)

OCP Microscaling Formats v1.0, in the layout `mxfp4-pack-quantized` of compressed-tensors: byte j of a row holds column 2j in its low
nibble and column 2j+1 in its high one; the scale byte is E8M0 (bias 127, 255 = NaN). Every value is exact in bfloat16.

Values always survive a round trip through the larger types; codes do where the block's largest is 4 or 6 and its scale is one that
`mode` would choose, and CEIL loses a bit on its own output. So re-encode stored weights by copying their bytes, never by this file.

Axes: N contraction length (input columns), the last one; every axis before it is free.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits of a code; bit 3 is the sign, and 8 is −0
_CHUNK = {"cpu": 1 << 18}  # values per pass, so that the float32 temporaries stay in a core's cache; elsewhere:
_CHUNK_LARGE = 1 << 24  #     bounds them all the same, with few kernel launches

# How the scale's exponent follows from the block's largest magnitude amax = m·2^e, 1 ≤ m < 2: it's e − 2 (4 = 2^2 is E2M1's largest
# power of two), or e − 1 where m is large. Adding these to the bits of a float32 carries into its exponent for just those m:
_CARRY = {
    "floor": 0,  #          never: amax/scale < 8, so values above 6 saturate
    "even": 0x200000,  #    m ≥ 1.75, as if amax were first rounded to E2M1's one mantissa bit: amax/scale < 7
    "rceil": 0x3FFFFF,  #   m > 1.5: ⌈log2(amax/6)⌉, the smallest scale with which nothing saturates
    "ceil": 0x7FFFFF,  #    m > 1: ⌈log2 amax⌉ − 2: amax/scale ≤ 4
}
MODES = tuple(_CARRY)


def quantize_mxfp4(w: Tensor, mode: str = "even") -> tuple[Tensor, Tensor]:
    """w `[..., N]`, any float dtype → packed codes uint8 `[..., N/2]` and scale bytes uint8 `[..., N/32]`.

    Elements are rounded to nearest, ties to even, and saturate at ±6·scale. `mode` is floor, even, rceil or ceil (OCP's sample
    algorithm; compressed-tensors' rule; NVIDIA's, arXiv 2506.08027; the widest). A block of zeros has codes 0; a block
    with an infinity or a NaN has scale byte 255 and dequantises to NaN. Raises ValueError when N isn't a multiple of 32.
    """
    if mode.lower() not in _CARRY:
        raise ValueError(f"unknown MXFP4 scale mode {mode!r}: use one of {', '.join(MODES)}")
    if not w.is_floating_point():
        raise ValueError(f"MXFP4 quantises floating-point tensors, not {w.dtype}")
    columns = w.shape[-1] if w.dim() else 0
    if columns == 0 or columns % GROUP:
        raise ValueError(f"MXFP4 needs a contraction length (last dimension) that is a multiple of {GROUP}, not shape {tuple(w.shape)}")
    packed = torch.empty(*w.shape[:-1], columns // 2, dtype=torch.uint8, device=w.device)
    scale = torch.empty(*w.shape[:-1], columns // GROUP, dtype=torch.uint8, device=w.device)
    for rows, p, s in _chunks(w.detach().contiguous(), packed, scale):
        _quantize(rows, p, s, _CARRY[mode.lower()])
    return packed, scale


def dequantize_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
    """Packed codes uint8 `[..., N/2]` and scale bytes uint8 `[..., N/32]` → values `[..., N]` in `dtype`, or in `out` and its dtype.

    Exact in bfloat16, float32 and float64, from 2^−128 up to the type's largest value; float16 reaches neither end. `out` must be
    contiguous. Raises ValueError when the shapes don't belong together.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"MXFP4 codes and scales are uint8, not {packed.dtype} and {scale.dtype}")
    shape = (*packed.shape[:-1], packed.shape[-1] * 2)
    if shape[-1] % GROUP or tuple(scale.shape) != (*shape[:-1], shape[-1] // GROUP):
        raise ValueError(f"MXFP4 codes {tuple(packed.shape)} and scales {tuple(scale.shape)} don't belong to one tensor")
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=packed.device)
    elif tuple(out.shape) != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, not {shape}")
    signed = torch.tensor([*E2M1, *(-v for v in E2M1)], device=packed.device)
    pairs = torch.stack([signed.repeat(16), signed.repeat_interleave(16)], -1)             # [256, 2]: both columns of each byte
    for values, p, s in _chunks(out, packed.contiguous(), scale.contiguous()):
        blocks = torch.nn.functional.embedding(p.int(), pairs).view(*s.shape, GROUP)        # [rows, N/32, 32]
        values.copy_((blocks * _exp2(s).unsqueeze(-1)).view_as(values))
    return out


def _quantize(w: Tensor, packed: Tensor, scale: Tensor, carry: int) -> None:
    """One chunk: w `[R, N]` into packed `[R, N/2]` and scale `[R, N/32]`."""
    blocks = w.float().view(w.shape[0], -1, GROUP)
    amax = blocks.abs().amax(-1)                                                           # NaN where the block has one
    exponent = (((amax.view(torch.int32) + carry) >> 23) - 2).clamp_(min=0)                # biased; a float32's bits order like its value
    x = blocks * ((254 - exponent) << 23).view(torch.float32).unsqueeze(-1)                # w / scale, exactly
    a = x.abs()
    # Round to nearest even on three grids of steps 1/2, 1 and 2; each is the finest that reaches its range, so the least code is right.
    codes = (a * 2).round_().clamp_(max=7)
    codes = torch.minimum(codes, a.round().add_(2))
    codes = torch.minimum(codes, a.mul_(0.5).round_().add_(4)).to(torch.uint8)
    codes |= x.signbit().to(torch.uint8) << 3
    bad = ~amax.isfinite()
    codes.masked_fill_((bad | (amax == 0)).unsqueeze(-1), 0)
    scale.copy_(exponent.masked_fill_(bad, 255))
    codes = codes.view(w.shape)
    torch.bitwise_or(codes[:, 0::2], codes[:, 1::2] << 4, out=packed)


def _exp2(scale: Tensor) -> Tensor:
    """2^(byte − 127) as float32, made from bits: byte 0 is subnormal and 255 is NaN."""
    bits = scale.int() << 23
    bits.masked_fill_(scale == 0, 0x00400000).masked_fill_(scale == 255, 0x7FC00000)
    return bits.view(torch.float32)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The contiguous tensors (values first) as matrices of as many rows, cut into pieces of a few million values."""
    values = tensors[0]
    step = max(1, _CHUNK.get(values.device.type, _CHUNK_LARGE) // values.shape[-1])
    return zip(*(t.view(-1, t.shape[-1]).split(step) for t in tensors), strict=True)
