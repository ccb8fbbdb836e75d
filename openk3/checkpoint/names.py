"""What the release calls each tensor, what the model calls it, and which spellings of early ports are understood. No torch here.

In memory the routed experts of a layer are stacked (`experts.w1` `[E, F, L]`); a file holds each expert's matrix on its own
(`experts.7.w1.weight`, or `.weight_packed` and `.weight_scale`). Text tensors of a wrapped config begin with `language_model.`,
those of a flat one (Kimi Linear) and the vision tower's don't. `A_log` is stored padded with zeros to a multiple of 128.
"""

import re

PREFIX = "language_model."
VISION = ("vision_tower.", "mm_projector.")
A_LOG_MULTIPLE = 128

# Stored and kept as float32 whatever the rest is: rounding any of these changes what is computed (the last one, which experts are picked).
FLOAT32 = ("_conv1d.weight", ".A_log", ".dt_bias", ".o_norm.weight", ".e_score_correction_bias")

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(w[123])\.(weight|weight_packed|weight_scale)")
_STACK = re.compile(r"(.+\.experts)\.(w[123])(_packed|_scale)?")
_RESIDUAL = re.compile(r"(self_attention_res|mlp_res|output_attn_res)\.(proj|norm)_weight$")
_OUTSIDE_MODEL = re.compile(r"(layers|embed_tokens|norm|output_attn_res_(proj|norm))\.")


def keeps_float32(name: str) -> bool:
    return name.endswith(FLOAT32)


def is_vision(name: str) -> bool:
    return name.startswith(VISION)


def released(name: str, flat: bool) -> str:
    """The released name of a tensor that isn't a stack of experts, from the model's."""
    return name if flat or is_vision(name) else PREFIX + name


def canonical(name: str, flat: bool) -> str:
    """The released name of a stored tensor, whose spelling may be an early port's.

    Understood: `self_attention_res.proj_weight` and the like, `language_model.layers.…` without `model.`, and the prefix
    `language_model.` where the config doesn't ask for it or absent where it does. Any other name comes back as it is.
    """
    if is_vision(name):
        return name
    inner = name.removeprefix(PREFIX)
    if "_res." in inner:
        inner = _RESIDUAL.sub(r"\1_\2.weight", inner)
    if not inner.startswith("model.") and _OUTSIDE_MODEL.match(inner):
        inner = "model." + inner
    return inner if flat else PREFIX + inner


def split_stack(name: str) -> tuple[str, str, str] | None:
    """`…experts.w1_packed` → (`…experts`, `w1`, `_packed`): a stack in the model's names; None for any other tensor."""
    match = _STACK.fullmatch(name)
    return (match[1], match[2], match[3] or "") if match else None


def split_expert(name: str) -> tuple[str, int, str, str] | None:
    """`…experts.7.w1.weight_scale` → (`…experts`, 7, `w1`, `weight_scale`): one expert's in a file; None for any other tensor."""
    match = _EXPERT.fullmatch(name)
    return (match[1], int(match[2]), match[3], match[4]) if match else None


def padded(heads: int) -> int:
    """The stored length of `A_log`."""
    return -(-heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE
