"""What a config says of packed experts: K3's MXFP4 in compressed-tensors' vocabulary (K3 report §4; the codec itself is in `ops/mx.py`).

The description never decides which tensors are packed: the stored names do (`weight_packed` or `weight`).
"""

from collections.abc import Mapping
from typing import Any

from openk3.errors import UserError
from openk3.schema import FrozenDict

MXFP4_GROUP = 32  # input columns that share a scale

# As K3's own file has it; also what we write beside experts that we pack ourselves.
MXFP4_QUANTIZATION = FrozenDict(
    {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": MXFP4_GROUP,
                    "dynamic": False,
                    "observer": "minmax",
                    "scale_dtype": "torch.uint8",
                },
                "input_activations": None,
            }
        },
        "kv_cache_scheme": None,
    }
)


def check_quantization(quantization: Mapping[str, Any], path: str) -> None:
    """Raises `UserError` unless this is the one form that openk3 reads. `path` is the field's place in the config, for the message."""
    if (quantization.get("quant_method"), quantization.get("format")) != ("compressed-tensors", "mxfp4-pack-quantized"):
        raise UserError(f"{path}: openk3 reads quant_method 'compressed-tensors' with format 'mxfp4-pack-quantized' only")
    groups = quantization.get("config_groups", FrozenDict())
    for group in groups.values() if isinstance(groups, Mapping) else [groups]:
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or (weights.get("num_bits"), weights.get("group_size")) != (4, MXFP4_GROUP):
            raise UserError(f"{path}.config_groups: openk3 reads weights of 4 bits in groups of {MXFP4_GROUP} only")
