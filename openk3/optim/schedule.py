"""Learning rates as pure functions of progress, so that training by tokens, by steps or by the clock shares them."""

import math

from openk3.errors import UserError

SHAPES = ("cosine", "wsd", "constant")


def lr_at(
    progress: float, *, peak: float, warmup: float = 0.01, floor: float = 0.0, shape: str = "cosine", decay: float = 0.2
) -> float:
    """The learning rate at `progress`, the fraction of the training that is done (0 … 1; taken to the nearer end outside).

    A linear warm-up from 0 over the first `warmup` of the training, then "cosine" (K3 report §3.3: with 1 % warm-up), "wsd" (constant,
    then linear over the last `decay` of the training; needs warmup + decay ≤ 1) or "constant". floor: what is left at the end, as a
    fraction of `peak`. At progress 0 the rate is 0, so give a step the progress at its end, or at its middle.
    """
    if shape not in SHAPES:
        raise UserError(f"unknown learning-rate schedule {shape!r}: use one of {', '.join(SHAPES)}")
    if not (0 <= warmup < 1 and 0 <= floor <= 1) or (shape == "wsd" and not 0 < decay <= 1 - warmup):
        raise UserError(f"learning-rate schedule: warmup {warmup}, decay {decay} and floor {floor} are fractions, with warmup + decay ≤ 1")
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return peak * progress / warmup
    if shape == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))
    elif shape == "wsd":
        left = min(1.0, (1 - progress) / decay)
    else:
        left = 1.0
    return peak * (floor + (1 - floor) * left)
