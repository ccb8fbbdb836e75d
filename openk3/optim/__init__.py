"""How a model is updated: which rule each parameter gets, Per-Head Muon with AdamW, learning-rate schedules, Quantile Balancing."""
