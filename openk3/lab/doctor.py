"""Is this installation sound? A handful of checks that need no network and take seconds, each of which can fail.

Parity is against values that an independent implementation computed for a tiny K3 (`golden/k3-tiny`, in the released layout).
"""

import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

import openk3
from openk3 import checkpoint
from openk3.checkpoint.convert import convert
from openk3.model.k3 import K3ForCausalLM
from openk3.ops.kda import kda_chunk, kda_recurrent
from openk3.optim.muon import MuonAdamW
from openk3.optim.specs import block_specs
from openk3.presets import nano
from openk3.text import ChatParser, Tokenizer, render
from openk3.train.loop import pick_device, pick_dtype

GOLDEN = Path(__file__).parent / "golden" / "k3-tiny"


@dataclass
class Check:
    name: str
    status: str                                              # ok, failed or skipped
    detail: str
    seconds: float


def examine() -> Iterator[Check]:
    """Run the checks one by one. A check that raises has failed; the others still run."""
    checks = [versions, hardware, golden_parity, chunk_form, cache_exactness, training_step, checkpoint_round_trip, chat_format]
    for check in checks:
        started = time.perf_counter()
        try:
            status, detail = "ok", check()
        except Exception as e:
            status, detail = "failed", f"{type(e).__name__}: {e}".splitlines()[0]
        yield Check(check.__name__.replace("_", " "), status, detail, time.perf_counter() - started)


def versions() -> str:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    require((major, minor) >= (2, 11), f"torch {torch.__version__} is older than 2.11: pip install 'torch>=2.11'")
    return f"openk3 {openk3.__version__}, torch {torch.__version__}, Python {platform.python_version()}"


def hardware() -> str:
    device = pick_device("auto")
    dtype = str(pick_dtype("auto", device)).removeprefix("torch.")
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    return (f"{device}, {torch.get_num_threads()} threads, trains in {dtype}; every operation runs in plain torch; "
            f"C++ compiler: {compiler or 'none, and none is needed'}")


def golden_parity() -> str:
    model, golden = checkpoint.load(GOLDEN), load_file(GOLDEN / "golden.safetensors")
    ids, expected = golden["input_ids"], golden["logits"]
    with torch.no_grad():
        out = model(ids, keep_hidden=True)
        loss = float(model.loss(ids[:, :-1], ids[:, 1:])) - float(golden["loss"])
    error = worst(out.logits, expected)
    hidden = max(worst(h, golden[f"layer.{layer}.hidden"]) for layer, h in enumerate(out.hidden))
    require(error < 1e-3 and hidden < 1e-3 and abs(loss) < 1e-5,
            f"logits are off by {error:.1e}, hidden states by {hidden:.1e} of their deviation, the loss by {loss:.1e}")
    return f"logits within {error:.0e}, hidden states within {hidden:.0e} of their deviation, loss within {abs(loss):.0e}"


def chunk_form() -> str:
    draw = torch.Generator().manual_seed(0)
    shape = (1, 83, 2, 16)
    q, k, v = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(3))
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    g, beta = -5 * torch.rand(shape, generator=draw, dtype=torch.float64), torch.rand(shape[:3], generator=draw, dtype=torch.float64)
    (a, s), (b, t) = kda_chunk(q, k, v, g, beta, bounded=True), kda_recurrent(q, k, v, g, beta)
    error = max(float((a - b).abs().max()), float((s - t).abs().max()))
    require(error < 1e-10, f"KDA's chunk form is {error:.1e} from the recurrence in float64")
    return f"KDA in chunks equals the recurrence within {error:.0e}"


def cache_exactness() -> str:
    model, ids = checkpoint.load(GOLDEN).double(), load_file(GOLDEN / "golden.safetensors")["input_ids"]
    with torch.no_grad():
        whole = model(ids).logits
        error = 0.0
        for pieces in ([70], [33, 37], [1] * 70):
            cache, parts, start = model.new_cache(ids.shape[0]), [], 0
            for size in pieces:
                parts.append(model(ids[:, start : start + size], cache=cache).logits)
                start += size
            error = max(error, worst(torch.cat(parts, 1), whole))
    require(error < 1e-9, f"a sequence fed in pieces is {error:.1e} of a deviation from the whole, in float64")
    return f"whole, in two pieces and token by token agree within {error:.0e} in float64"


def training_step() -> str:
    config = nano().with_vocab(512, bos=497, eos=499, pad=511)
    model = K3ForCausalLM(config).init_weights(0)
    optimizer = MuonAdamW(block_specs(model), lr=0.005)
    ids = torch.randint(0, 497, (2, 129), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(4):
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        without = [name for name, p in model.named_parameters() if p.grad is None and "layers.0.self_attention_res" not in name]
        require(not without, f"no gradient reaches {', '.join(without[:3])}")
        optimizer.step()
        losses.append(float(loss.detach()))
    require(losses[-1] < losses[0], f"the loss doesn't fall: {losses}")
    return f"nano's loss on one batch falls from {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses) - 1} steps"


def checkpoint_round_trip() -> str:
    model = checkpoint.load(GOLDEN)
    ids = torch.arange(40)[None] % model.config.text_config.vocab_size
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        before = model(ids).logits
        checkpoint.save(model, folder / "a")
        require(torch.equal(checkpoint.load(folder / "a")(ids).logits, before), "a saved model gives other logits when loaded")
        convert(folder / "a", folder / "packed", to="mxfp4")
        convert(folder / "packed", folder / "b", to="bf16")
        convert(folder / "b", folder / "again", to="mxfp4")
        first, second = (load_file(folder / n / "model.safetensors") for n in ("packed", "again"))
        require(all(torch.equal(first[key], second[key]) for key in first if "weight_packed" in key), "MXFP4 codes change in a round trip")
    return "saved and loaded: the same logits; MXFP4 to BF16 and back: the same codes"


def chat_format() -> str:
    tokenizer = Tokenizer.train(["def f(x):\n    return x\n"] * 4, 300)
    message = {"role": "assistant", "reasoning_content": "why <|open|>", "content": "so & so"}
    ids, mine = tokenizer.encode_segments(render([{"role": "user", "content": "<|end_of_msg|>"}, message], add_generation_prompt=False))
    require(ids.count(tokenizer.end_of_msg_id) == 2, "text can forge control tokens")
    parser = ChatParser(tokenizer, thinking=True)
    for one, belongs in zip(ids, mine, strict=True):
        if belongs:
            parser.feed([one])
    parser.finish("stop")
    found = parser.message
    same = all(found[part] == message[part] for part in ("content", "reasoning_content"))
    require(same, f"parsed back as {found}")
    return "a message is rendered and parsed back; text can't forge control tokens"


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in standard deviations of what's expected."""
    return float(((found - expected) / expected.std()).abs().max())


def require(fine: bool, otherwise: str) -> None:
    if not fine:
        raise AssertionError(otherwise)
