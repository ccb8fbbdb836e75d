"""A conversation with a model in XTML: messages in, a streamed answer out; what was said stays in the cache between turns."""

from collections.abc import Callable

from openk3.model.generate import Sampling
from openk3.text.chat import render
from openk3.text.parse import ChatParser, Event
from openk3.text.tokenizer import Tokenizer


class Conversation:
    """`messages` in OpenAI's form; `say` adds the user's and the model's turn. `reused` and `fed` count tokens of the last turn."""

    def __init__(self, model, tokenizer: Tokenizer, *, system: str | None = None, thinking: bool = True,
                 sampling: Sampling | None = None, seed: int | None = None):
        self.model, self.tokenizer, self.thinking = model, tokenizer, thinking
        self.sampling, self.seed = sampling, seed
        self.messages: list[dict] = [{"role": "system", "content": system}] if system else []
        self.cache, self.held = None, []                     # what the cache holds, as ids
        self.reused = self.fed = 0

    def say(self, text: str, max_new_tokens: int = 512, on_event: Callable[[Event], None] | None = None) -> dict:
        """The model's message; events (reasoning, content, tool calls) come as they are decoded."""
        self.messages.append({"role": "user", "content": text})
        ids, _ = self.tokenizer.encode_segments(render(self.messages, thinking=self.thinking))
        if self.cache is None or ids[: len(self.held)] != self.held or len(ids) <= len(self.held):
            self.cache, self.held = self.model.new_cache(1), []
        self.reused, self.fed = len(self.held), len(ids) - len(self.held)
        parser = ChatParser(self.tokenizer, thinking=self.thinking)

        def on_token(row: int, one: int) -> bool:
            for event in parser.feed([one]):
                if on_event:
                    on_event(event)
            return False

        try:
            new = self.model.generate([ids[self.reused :]], max_new_tokens, sampling=self.sampling, seed=self.seed,
                                      stop_ids=self.tokenizer.stop_ids, cache=self.cache, on_token=on_token)[0]
        except BaseException:                                # interrupted: the cache is ahead of what we know
            self.messages.pop()
            self.cache = None
            raise
        self.held = ids + new[:-1]                           # the last token was drawn, not read
        ended = bool(new) and new[-1] in self.tokenizer.stop_ids
        for event in parser.finish("stop" if ended else "length"):
            if on_event:
                on_event(event)
        self.messages.append(parser.message)
        return parser.message
