"""Training: options, the loop, the run folder, held-out scoring and samples."""
