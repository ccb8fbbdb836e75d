"""The laboratory: what is done with a model once it exists (completions, conversations, measurements, the doctor)."""
