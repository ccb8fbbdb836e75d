"""openk3: Kimi K3 that you can run, break, measure and trust on a laptop.

    from openk3 import K3ForCausalLM
    model = K3ForCausalLM.from_pretrained("runs/nano")

Importing this package loads no torch; the names below are bound when first asked for.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["HybridCache", "K3Config", "K3ForCausalLM", "Tokenizer", "UserError", "load", "save"]

if TYPE_CHECKING:
    from openk3.checkpoint import load, save
    from openk3.config import K3Config
    from openk3.errors import UserError
    from openk3.model.cache import HybridCache
    from openk3.model.k3 import K3ForCausalLM
    from openk3.text.tokenizer import Tokenizer


def __getattr__(name: str):
    if name == "K3ForCausalLM":
        from openk3.checkpoint import load, save
        from openk3.model.k3 import K3ForCausalLM as found

        found.from_pretrained, found.save_pretrained = staticmethod(load), save
        return found
    if name in ("load", "save"):
        from openk3 import checkpoint

        return getattr(checkpoint, name)
    if name == "K3Config":
        from openk3.config import K3Config as found
    elif name == "UserError":
        from openk3.errors import UserError as found
    elif name == "HybridCache":
        from openk3.model.cache import HybridCache as found
    elif name == "Tokenizer":
        from openk3.text.tokenizer import Tokenizer as found
    else:
        raise AttributeError(f"module 'openk3' has no attribute {name!r}")
    return found
