"""Text from a model as it comes: UTF-8 safe, ended by stop strings, for one prompt or many."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from openk3.errors import UserError
from openk3.model.generate import Sampling
from openk3.text.tokenizer import StreamDecoder, Tokenizer


class TextStream:
    """Token ids in, text out; text that may be the beginning of a stop string is held back until that's decided."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        if any(not s for s in stops):
            raise UserError("--stop: an empty stop string would end everything at once")
        self.decoder = StreamDecoder(tokenizer, skip_special=True)
        self.stops, self.held, self.text, self.stopped = tuple(stops), "", "", False

    def feed(self, ids: Iterable[int]) -> str:
        """The text that can be shown now."""
        return self._take(self.decoder.feed(ids), final=False)

    def finish(self) -> str:
        return self._take(self.decoder.flush(), final=True)

    def _take(self, new: str, final: bool) -> str:
        if self.stopped:
            return ""
        self.held += new
        found = [at for at in (self.held.find(s) for s in self.stops) if at >= 0]
        if found:
            self.stopped, keep = True, min(found)
            shown, self.held = self.held[:keep], ""
        else:
            back = 0 if final else max((n for s in self.stops for n in range(1, len(s)) if self.held.endswith(s[:n])), default=0)
            shown, self.held = self.held[: len(self.held) - back], self.held[len(self.held) - back :]
        self.text += shown
        return shown


@dataclass
class Completion:
    prompt: str
    text: str
    tokens: int
    finish_reason: str                                       # "stop" or "length"


def complete(model, tokenizer: Tokenizer, prompts: Sequence[str], *, max_new_tokens: int = 256, sampling: Sampling | None = None,
             seed: int | None = None, stops: Sequence[str] = (), batch_size: int = 16,
             on_text: Callable[[int, str], None] | None = None) -> list[Completion]:
    """Continue each prompt as a document that begins with it. on_text(prompt number, text) is called as text comes."""
    done: list[Completion] = []
    for first in range(0, len(prompts), batch_size):
        group = prompts[first : first + batch_size]
        streams = [TextStream(tokenizer, stops) for _ in group]

        def on_token(row: int, one: int, streams=streams, first=first) -> bool:
            if one in tokenizer.stop_ids:
                return True
            shown = streams[row].feed([one])
            if shown and on_text:
                on_text(first + row, shown)
            return streams[row].stopped

        ids = [[tokenizer.bos_id, *tokenizer.encode(p)] for p in group]
        new = model.generate(ids, max_new_tokens, sampling=sampling, stop_ids=tokenizer.stop_ids,
                             seed=None if seed is None else seed + first, on_token=on_token)
        for row, (prompt, stream, out) in enumerate(zip(group, streams, new, strict=True)):
            rest = stream.finish()
            if rest and on_text:
                on_text(first + row, rest)
            stopped = stream.stopped or (bool(out) and out[-1] in tokenizer.stop_ids)
            done.append(Completion(prompt, stream.text, len(out), "stop" if stopped else "length"))
    return done


def read_prompts(path: Path) -> list[str]:
    """A prompt a line; in a .jsonl file an object a line with `prompt`. Errors name the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise UserError(f"{path}: {e.strerror or e}; --input wants a text file with a prompt a line") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; --input wants a prompt a line, or .jsonl objects with a prompt") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            try:
                prompts.append(str(json.loads(line)["prompt"]))
            except (ValueError, KeyError, TypeError):
                raise UserError(f'{path}:{number}: not a JSON object with "prompt"') from None
        else:
            prompts.append(line)
    if not prompts:
        raise UserError(f"{path}: no prompt in it; write one a line")
    return prompts
