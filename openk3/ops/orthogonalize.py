"""Newton–Schulz orthogonalisation of many matrices at once: the heart of Muon (arXiv 2502.16982; K3 report §2.5).

For G = U S Vᵀ it returns about U Vᵀ, by matrix products alone: X ← aX + (bA + cA²)X with A = XXᵀ maps every singular value s to
as + bs³ + cs⁵, and a few such steps bring all of (0, 1] near 1. Axes: r rows, c columns of one matrix.
"""

import torch
from torch import Tensor

# (a, b, c) for each step; the last triple is repeated when more steps are asked for.
COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    # Keller Jordan's, used by Moonlight and K2 at 5 steps: steep at 0, singular values end in about 0.7 … 1.2.
    "quintic-muon": ((3.4445, -4.7750, 2.0315),),
    # Polar Express (arXiv 2505.16932), with its safety factor 1.01 folded in: converges to 1 as steps are added.
    "polar-express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    # The next two are NVIDIA emerging-optimizers' schedules, meant for 5 and 4 steps.
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}


@torch.no_grad()
def newton_schulz(
    G: Tensor, steps: int = 5, coefficients: str = "quintic-muon", eps: float = 1e-7, dtype: torch.dtype | None = None
) -> Tensor:
    """Orthogonalise each matrix of G [..., r, c] by itself; G is left as it is.

    Every matrix is divided by its own Frobenius norm + eps (norm in float32 or better), so the result doesn't depend on its scale,
    nor on the other matrices of the batch; a zero matrix stays zero. coefficients: a key of `COEFFICIENTS`.
    dtype: what to compute in and return; None is float32 (float64 for float64). bfloat16 is the usual choice where the machine has
    matrix units for it, and is off by about 1 %. Raises ValueError.
    """
    if G.ndim < 2:
        raise ValueError(f"newton_schulz needs matrices [..., r, c], got shape {tuple(G.shape)}")
    if coefficients not in COEFFICIENTS:
        raise ValueError(f"unknown Newton–Schulz coefficients {coefficients!r}: use one of {', '.join(COEFFICIENTS)}")
    if steps < 1:
        raise ValueError(f"newton_schulz needs at least 1 step, got {steps}")
    wide = torch.promote_types(G.dtype, torch.float32)
    tall = G.shape[-2] > G.shape[-1]
    X = G.reshape(-1, *G.shape[-2:])  # [n, r, c]
    X = X / torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=wide).add_(eps)
    X = (X.mT if tall else X).to(dtype or wide).contiguous()  # [n, short, long]: the Gram matrix is the small one
    gram = X.new_empty(X.shape[0], X.shape[1], X.shape[1])
    poly, spare = torch.empty_like(gram), torch.empty_like(X)
    schedule = COEFFICIENTS[coefficients]
    for step in range(steps):
        a, b, c = schedule[min(step, len(schedule) - 1)]
        torch.bmm(X, X.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=poly)  # bA + cA²
        torch.baddbmm(X, poly, X, beta=a, out=spare)
        X, spare = spare, X
    return (X.mT if tall else X).reshape(G.shape)
