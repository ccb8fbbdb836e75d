"""Checkpoints in the released layout: `load(dir)` and `save(model, dir)`; beside them `audit` (look), `convert` (pack and unpack)."""

from .reader import load
from .writer import save

__all__ = ["load", "save"]
