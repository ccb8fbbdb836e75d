"""Completions end where a stop string begins, whatever the pieces; a conversation's cache gives what no cache gives."""

import random

import pytest
import torch

from openk3 import Tokenizer
from openk3.errors import UserError
from openk3.lab.completion import TextStream, complete, read_prompts
from openk3.lab.conversation import Conversation
from openk3.model.generate import Sampling
from openk3.model.k3 import K3ForCausalLM
from openk3.presets import nano

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["def f(x):\n    return x + 1\n", "for i in range(10):\n    print(i)\n"] * 8, 320)


@pytest.fixture(scope="module")
def model(tokenizer):
    t = tokenizer
    config = nano().with_vocab(t.vocab_size, bos=t.bos_id, eos=t.eos_id, pad=t.pad_id, media_placeholder=t.media_pad_id)
    torch.manual_seed(0)
    return K3ForCausalLM(config).init_weights(0).eval()


@pytest.mark.parametrize("seed", range(20))
def test_a_stop_string_ends_the_text_however_it_is_split(tokenizer, seed):
    draw = random.Random(seed)
    text = "".join(draw.choice(["ab", "a", "b", "END", "EN", "é", "\n"]) for _ in range(30))
    stops = ["ENDa", "b\nb", "éé"]
    expected = text[: min([text.find(s) for s in stops if s in text], default=len(text))]
    stream, ids = TextStream(tokenizer, stops), tokenizer.encode(text)
    while ids:
        n = draw.randint(1, 4)
        stream.feed(ids[:n])
        ids = ids[n:]
    stream.finish()
    assert stream.text == expected and stream.stopped == (expected != text)


def test_many_prompts_give_what_each_gives_alone(model, tokenizer):
    prompts = ["def f(", "for", "import os\nx = 1\n", "a"]
    together = complete(model, tokenizer, prompts, max_new_tokens=12, sampling=GREEDY, batch_size=3)
    for prompt, found in zip(prompts, together, strict=True):
        assert found == complete(model, tokenizer, [prompt], max_new_tokens=12, sampling=GREEDY)[0]


def test_streamed_text_is_the_text_returned(model, tokenizer):
    pieces: dict[int, str] = {}
    found = complete(model, tokenizer, ["x", "def"], max_new_tokens=20, seed=3,
                     on_text=lambda n, text: pieces.__setitem__(n, pieces.get(n, "") + text))
    assert [pieces.get(n, "") for n in range(2)] == [c.text for c in found]


def test_prompts_are_read_from_text_and_jsonl(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "a\\nb"}\n')
    assert read_prompts(tmp_path / "a.txt") == ["one", "two"] and read_prompts(tmp_path / "b.jsonl") == ["a\nb"]
    (tmp_path / "c.jsonl").write_text('{"prompt": "a"}\n{"text": 1}\n')
    (tmp_path / "empty.txt").write_text("\n")
    for name, words in (("c.jsonl", "c.jsonl:2"), ("empty.txt", "no prompt"), ("none.txt", "none.txt")):
        with pytest.raises(UserError, match=words):
            read_prompts(tmp_path / name)


def test_a_conversation_reads_only_what_is_new_and_answers_as_if_it_read_all(model, tokenizer):
    talk = Conversation(model, tokenizer, sampling=GREEDY, thinking=False)
    talk.say("hello", 8)
    first = talk.fed
    talk.say("and then?", 8)
    again = Conversation(model, tokenizer, sampling=GREEDY, thinking=False)
    again.messages = talk.messages[:2]
    again.say("and then?", 8)
    assert again.messages == talk.messages and again.reused == 0
    assert talk.reused + talk.fed == again.fed and first < again.fed


def test_an_interrupted_turn_is_forgotten(model, tokenizer):
    talk = Conversation(model, tokenizer, sampling=GREEDY)

    def interrupt(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.say("hello", 50, interrupt)
    assert talk.messages == []
    assert talk.say("hello", 4)["role"] == "assistant"
