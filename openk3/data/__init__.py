"""From text to batches: the corpus and its held-out part, packed training rows, and windows that score held-out text."""
