"""The house stands: imports go down, never up or across, and what needs no torch loads none."""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import openk3

PACKAGE = Path(openk3.__file__).parent

# Who may import what. A module belongs to the longest entry that begins its name; each may import its own entry, and the floors below.
FLOORS = {
    1: ["config", "errors", "schema", "presets", "counts", "quantization", "text"],
    2: ["ops"],
    3: ["model"],
    4: ["checkpoint"],
    5: ["data", "optim", "parallel", "report"],
    6: ["train", "serve"],
    7: ["lab", "hub"],
    8: ["cli", "__main__"],
}
FLOOR = {room: floor for floor, rooms in FLOORS.items() for room in rooms}
TOGETHER = {1, 7, 8}  # floors whose rooms may use each other; those of 5 and 6 never do
APART = {"plan": {"config", "errors"}}  # no floor: imports these alone, and only the top may import it
TORCHLESS = {"config", "errors", "schema", "presets", "counts", "quantization", "text", "plan"}
# The porch stands above the house: the top floors may use it, anybody else reads the version there and nothing more.
PORCH = {None: {"openk3.__version__"}, "ops": set(), **{room: {"openk3", "openk3.__version__"} for room in FLOORS[7] + FLOORS[8]}}
ONLY_TORCH = {"ops": {"torch"}}  # third parties a room may import, where it's held to a list


def room(module: str) -> str:
    """`openk3.model.k3` → `model`."""
    return module.removeprefix("openk3.").partition(".")[0]


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, root: Path) -> Iterable[tuple[int, str]]:
    """(line, absolute module) of every import of a file: at the top, in functions, under TYPE_CHECKING, relative or by name."""
    package = module_name(path, root).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:  # `from openk3 import checkpoint` imports a module, `from openk3.config import K3Config` a name
                yield node.lineno, f"{base}.{alias.name}" if base == "openk3" else base
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__"):
            argument = node.args[0] if node.args else None
            yield node.lineno, argument.value if isinstance(argument, ast.Constant) else "openk3.<computed>"


def violations(root: Path) -> list[str]:
    found = []
    for path in sorted(root.rglob("*.py")):
        name = module_name(path, root)
        if name == "openk3":  # the porch
            continue
        here = room(name)
        if here not in FLOOR and here not in APART:
            found.append(f"{name}: no floor of the house has such a room")
            continue
        for line, target in imports(path, root):
            top = target.partition(".")[0]
            if top == "openk3":
                why = "" if target in PORCH.get(here, PORCH[None]) else forbidden(here, room(target))
            elif top == "torch" and here in TORCHLESS:
                why = "loads torch"
            elif here in ONLY_TORCH and top not in ONLY_TORCH[here] | sys.stdlib_module_names:
                why = f"needs more than {', '.join(ONLY_TORCH[here])}"
            else:
                why = ""
            if why:
                found.append(f"{name}:{line} imports {target}: {why}")
    return found


def forbidden(here: str, there: str) -> str:
    """Why a room may not import another; empty where it may."""
    if here == there:
        return ""
    if here == "ops":
        return "ops imports nothing of the house"
    if there not in FLOOR and there not in APART:
        return "no such room"
    if here in APART:
        return "" if there in APART[here] else f"{here} stands apart"
    if there in APART:
        return "" if FLOOR[here] >= 7 else f"{there} stands apart"
    if FLOOR[there] > FLOOR[here]:
        return f"floor {FLOOR[there]} is above floor {FLOOR[here]}"
    if FLOOR[there] == FLOOR[here] and FLOOR[here] not in TOGETHER:
        return f"both stand on floor {FLOOR[here]}"
    return ""


def test_imports_go_down() -> None:
    assert violations(PACKAGE) == []


def test_the_package_was_read() -> None:
    read = {module_name(path, PACKAGE) for path in PACKAGE.rglob("*.py")}
    assert {"openk3.config", "openk3.ops.kda", "openk3.model.k3", "openk3.checkpoint", "openk3.text.chat"} <= read


# The check finds what it should


def house(tmp_path: Path, **files: str) -> Path:
    """A small house: `model__k3="import torch"` is openk3/model/k3.py."""
    root = tmp_path / "openk3"
    for name, text in {"__init__": "from openk3.cli import main\n", **files}.items():
        path = root / Path(*name.replace("dunder", "__main__").split("__")) if name not in ("__init__", "__main__") else root / name
        path = path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


GOOD = [
    ("model__k3", "import torch\nfrom openk3.ops.kda import kda_chunk\nfrom openk3.config import K3Config\nfrom .layers import MLP"),
    ("ops__kda", "import math\nimport torch.nn.functional as F\nfrom openk3.ops import backend\nfrom . import rope"),
    ("text__chat", "import json\nimport tokenizers\nfrom ..errors import UserError"),
    ("counts", "from openk3.config import K3Config\nfrom openk3 import presets"),
    ("cli", "import openk3\nfrom openk3.train.loop import train\nfrom openk3 import plan"),
    ("lab__doctor", "import openk3\nfrom openk3 import checkpoint"),
    ("plan__search", "from openk3.config import K3Config\nfrom openk3.plan import cost"),
    ("train__loop", "from openk3 import __version__\nfrom openk3.optim.muon import Muon\nfrom openk3.data import packing"),
]
BAD = [
    ("model__k3", "from openk3.checkpoint import load", "openk3.model.k3:1 imports openk3.checkpoint: floor 4 is above floor 3"),
    ("model__k3", "def f():\n    import openk3.checkpoint.reader", "openk3.model.k3:2 imports openk3.checkpoint.reader: floor 4"),
    ("model__k3", "from ..train.loop import train", "imports openk3.train.loop: floor 6 is above floor 3"),
    ("model__k3", "from .. import train", "imports openk3.train: floor 6 is above floor 3"),
    ("model__k3", "from openk3 import train", "imports openk3.train: floor 6"),
    ("model__k3", "from openk3 import K3ForCausalLM", "imports openk3.K3ForCausalLM: no such room"),
    ("model__k3", "import openk3", "imports openk3: no such room"),
    ("model__k3", "if TYPE_CHECKING:\n    from openk3.serve.engine import Engine", "k3:2 imports openk3.serve.engine: floor 6"),
    ("model__k3", "import importlib\nimportlib.import_module('openk3.train')", "openk3.model.k3:2 imports openk3.train: floor 6"),
    ("model__k3", "import importlib\nimportlib.import_module(name)", "imports openk3.<computed>: no such room"),
    ("ops__kda", "from openk3.config import K3Config", "ops imports nothing of the house"),
    ("ops__kda", "from openk3 import __version__", "ops imports nothing of the house"),
    ("ops__kda", "import numpy as np", "imports numpy: needs more than torch"),
    ("text__chat", "import torch", "openk3.text.chat:1 imports torch: loads torch"),
    ("config", "def f():\n    from torch import Tensor", "openk3.config:2 imports torch: loads torch"),
    ("config", "from openk3.ops import mx", "floor 2 is above floor 1"),
    ("train__loop", "from openk3.serve import engine", "both stand on floor 6"),
    ("serve__engine", "from openk3.train import loop", "both stand on floor 6"),
    ("data__packing", "from openk3.optim.muon import Muon", "both stand on floor 5"),
    ("report__page", "from ..data import corpus", "both stand on floor 5"),
    ("plan__search", "from openk3.counts import count", "plan stands apart"),
    ("plan__search", "import torch", "loads torch"),
    ("train__loop", "from openk3.plan import search", "plan stands apart"),
    ("utils__helpers", "", "openk3.utils.helpers: no floor of the house has such a room"),
    ("helpers", "", "openk3.helpers: no floor of the house has such a room"),
]


@pytest.mark.parametrize("name,text", GOOD)
def test_an_import_that_goes_down_is_let_through(name: str, text: str, tmp_path: Path) -> None:
    assert violations(house(tmp_path, **{name: text})) == []


@pytest.mark.parametrize("name,text,message", BAD)
def test_an_import_that_goes_up_or_across_is_found(name: str, text: str, message: str, tmp_path: Path) -> None:
    found = violations(house(tmp_path, **{name: text}))
    assert len(found) == 1 and message in found[0], found


# What loads no torch


@pytest.mark.parametrize("modules", ["openk3", "openk3.config, openk3.counts, openk3.presets", "openk3.text, openk3.text.chat"])
def test_no_torch_is_loaded(modules: str) -> None:
    code = f"import sys, {modules}; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_module_is_importable_alone() -> None:
    """Each in the order of its name, none prepared by another: no cycle is hidden by luck (one process, modules forgotten between)."""
    names = sorted(module_name(path, PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__main__.py")
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    for old in [m for m in sys.modules if m.partition('.')[0] == 'openk3']:\n"
        "        del sys.modules[old]\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
