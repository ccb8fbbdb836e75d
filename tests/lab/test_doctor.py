"""The doctor finds nothing wrong here, and finds what is put wrong."""

import pytest
import torch

from openk3.lab import doctor
from openk3.model.kda import KimiDeltaAttention
from openk3.model.latent_moe import LatentMoE


def test_this_installation_is_well():
    checks = list(doctor.examine())
    assert [c.name for c in checks if c.status != "ok"] == [] and len(checks) == 8


@pytest.mark.parametrize("fault, caught_by", [
    (lambda m: m.setattr(KimiDeltaAttention, "decay",
                         lambda self, x: torch.zeros(*x.shape[:2], self.heads, self.size)), "golden_parity"),
    (lambda m: m.setattr(KimiDeltaAttention, "_new_tail", lambda self, raw, tail, layout: torch.zeros_like(raw[:, :3])
                         if raw.shape[1] >= 3 else raw.new_zeros(raw.shape[0], 3, raw.shape[2])), "cache_exactness"),
    (lambda m: m.setattr(LatentMoE, "forward", lambda self, x, valid=None: x), "golden_parity"),
    (lambda m: m.setattr(doctor, "kda_chunk",
                         lambda q, k, v, g, beta, bounded: doctor.kda_recurrent(q, k, v, g * 0.999, beta)), "chunk_form"),
])
def test_a_fault_is_found(monkeypatch, fault, caught_by):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        getattr(doctor, caught_by)()
