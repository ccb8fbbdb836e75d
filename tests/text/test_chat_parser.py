import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.text import ChatParser, generation_channel, parse_message, render
from openk3.text.tokenizer import CONTROL_TOKENS

HOSTILE = st.sampled_from(
    [*CONTROL_TOKENS, '"', "&", "&quot;", "&amp;quot;", "<", "think", ' x="y"', "\n", " ", "\\", "\0", "é", "😀", "你好"]
)
TEXT = st.one_of(st.text(max_size=20), st.lists(HOSTILE, max_size=6).map("".join))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(TEXT.filter(bool), st.dictionaries(TEXT, JSON, max_size=3)), max_size=3)


def write(tokenizer, text):
    """Ids of a model's output: control tokens where they're spelled, BPE between them."""
    names = "|".join(re.escape(name) for name in CONTROL_TOKENS)
    ids = []
    for part in re.split(f"({names})", text):
        ids += [tokenizer.controls[part]] if part in tokenizer.controls else tokenizer.encode(part)
    return ids


def as_bytes(tokenizer, ids):
    """The same bytes, one token each: what a model may write too."""
    byte_ids = {tokenizer.bytes_of(i): i for i in range(tokenizer.text_size) if len(tokenizer.bytes_of(i)) == 1}
    return [x for id in ids for x in ([id] if tokenizer.is_control(id) else [byte_ids[bytes([b])] for b in tokenizer.bytes_of(id)])]


def run(tokenizer, ids, sizes=(10**9,), thinking=True, reason="stop", **options):
    """Feeds ids in parts of the sizes, over and over; checks that deltas join to the message, and gives the parser and events."""
    parser, events, at, turn = ChatParser(tokenizer, thinking, **options), [], 0, 0
    while at < len(ids):
        events += parser.feed(ids[at : at + sizes[turn % len(sizes)]])
        at, turn = at + sizes[turn % len(sizes)], turn + 1
    events += parser.finish(reason)
    assert parser.finish() == [] and parser.feed(ids) == []
    message = parser.message
    assert "".join(event.text for event in events if event.kind == "reasoning") == message.get("reasoning_content", "")
    assert "".join(event.text for event in events if event.kind == "content") == message["content"]
    ended = [event.index for event in events if event.kind == "tool_call_end"]
    streamed = [(event.id, event.name) for event in events if event.kind == "tool_call" and event.index in ended]
    for (id, name), index, call in zip(streamed, ended, message.get("tool_calls", []), strict=True):
        arguments = "".join(event.text for event in events if event.kind == "arguments" and event.index == index)
        assert call == {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    assert [(event.kind, event.reason) for event in events if event.kind == "done"] == [("done", parser.finish_reason)]
    assert events[-1].kind == "done"
    return parser, events


def joined(events):
    """Events with neighbouring deltas joined."""
    out = []
    for event in events:
        if event.text and out and (out[-1][0], out[-1][2]) == (event.kind, event.index):
            out[-1][1] += event.text
        else:
            out.append([event.kind, event.text, event.index, event.id, event.name, event.reason])
    return out


@given(TEXT, TEXT, CALLS, st.booleans(), st.booleans(), st.lists(st.integers(1, 7), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_a_rendered_message_parses_back_in_any_split(tokenizer, reasoning, content, calls, thinking, bytewise, sizes):
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [
            {"id": f"call_{i}", "function": {"name": name, "arguments": arguments}} for i, (name, arguments) in enumerate(calls)
        ],
    }
    segments = render([message], thinking=thinking, add_generation_prompt=False)
    ids, _ = tokenizer.encode_segments(segments)
    ids = as_bytes(tokenizer, ids) if bytewise else ids
    parser, events = run(tokenizer, ids, sizes, thinking)
    whole, whole_events = run(tokenizer, ids, thinking=thinking)
    assert joined(events) == joined(whole_events) and parser.message == whole.message
    expected = {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if thinking else {})
    got = parser.message
    got_calls = got.pop("tool_calls", [])
    assert got == expected and parser.finish_reason == ("tool_calls" if calls else "stop")
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in got_calls] == [
        (name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls
    ]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_ids_parse_without_a_control_token_in_any_text(tokenizer, data):
    words = [
        tokenizer.encode(word)
        for word in ("think", "response", "tools", "call", ' tool="f"', ' key="k"', "argument", "json", "message", "x")
    ]
    controls = [[id] for id in (tokenizer.open_id, tokenizer.close_id, tokenizer.sep_id)]
    rare = [[id] for id in (tokenizer.end_of_msg_id, tokenizer.eos_id, tokenizer.bos_id, tokenizer.media_pad_id)]
    piece = st.one_of(st.sampled_from(controls), st.sampled_from(words), st.sampled_from(rare + words))
    ids = sum(data.draw(st.lists(piece, max_size=40)), [])
    thinking, reason = data.draw(st.booleans()), data.draw(st.sampled_from(["stop", "length"]))
    whole, events = run(tokenizer, ids, (10**9,), thinking, reason)
    one, one_events = run(tokenizer, ids, (1,), thinking, reason)
    assert whole.message == one.message and whole.finish_reason == one.finish_reason and joined(events) == joined(one_events)
    assert whole.reasoning_tokens == one.reasoning_tokens
    assert not any(name in json.dumps(whole.message) for name in CONTROL_TOKENS)


CALL_F = '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|>'
END = "<|close|>message<|sep|><|end_of_msg|>"


def test_a_spelled_marker_is_text(tokenizer):
    ids = tokenizer.encode("a <|close|>think<|sep|> b") + write(tokenizer, "<|close|>think<|sep|><|open|>response<|sep|>")
    ids += tokenizer.encode("<|open|>tools<|sep|>[EOS]") + write(tokenizer, "<|close|>response<|sep|>" + END)
    message = run(tokenizer, ids, (1,))[0].message
    assert message == {"role": "assistant", "reasoning_content": "a <|close|>think<|sep|> b", "content": "<|open|>tools<|sep|>[EOS]"}


@pytest.mark.parametrize(
    "close",
    ["<|close|>think<|sep|><|open|>response<|sep|>", "<|close|>think<|open|>response<|sep|>", "<|open|>response<|sep|>",
     "<|close|>think<|sep|>", "<|close|>think", "<|close|>think<|sep|>\n\n", "<|close|><|open|>response<|sep|>", "<|open|>response"],
)  # fmt: skip
def test_every_way_to_end_thinking_ends_it(tokenizer, close):
    message = run(tokenizer, write(tokenizer, f"Hm.{close}Yes. No<|close|>response<|sep|>{END}"), (1,))[0].message
    assert message == {"role": "assistant", "reasoning_content": "Hm.", "content": "Yes. No"}


@pytest.mark.parametrize("opening", ["<|open|>tools<|sep|>", "<|close|>think<|open|>tools<|sep|>", "<|open|>tools", ""])
def test_a_call_right_after_thinking_is_not_lost(tokenizer, opening):
    parser, _ = run(tokenizer, write(tokenizer, f"Hm.{opening}{CALL_F}<|close|>tools<|sep|>{END}"))
    assert parser.message["reasoning_content"] == "Hm." and parser.message["content"] == "" and parser.finish_reason == "tool_calls"
    assert parser.message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


@pytest.mark.parametrize(
    "end",
    ["<|close|>response<|sep|>" + END, "<|close|>response<|sep|>junk" + END,
     END, "<|end_of_msg|>", "[EOS]", "<|close|>response<|end_of_msg|>",
     "<|open|>message role=\"user\"<|sep|>more", "", "<|close|>respo", "<|open|>", "<|open|>tools<|sep|><|close|>tools<|sep|>" + END],
)  # fmt: skip
def test_content_ends_alike_however_it_ends(tokenizer, end):
    ids = write(tokenizer, f"Yes.{end}")
    for sizes in ((1,), (2,), (10**9,)):
        parser, _ = run(tokenizer, ids, sizes, thinking=False)
        assert parser.message == {"role": "assistant", "content": "Yes."} and parser.finish_reason == "stop"


def test_a_closing_tag_of_something_else_changes_nothing(tokenizer):
    ids = write(tokenizer, "Yes<|close|>tools<|sep|>, <|close|>think<|sep|>no<|close|>argument<|sep|>.<|close|>call<|sep|>" + END)
    assert run(tokenizer, ids, thinking=False)[0].message["content"] == "Yes, no."


def test_running_on_into_a_next_message_ends_this_one_with_its_calls(tokenizer):
    text = '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>message role="user"<|sep|>more'
    parser, _ = run(tokenizer, write(tokenizer, text))
    assert [call["function"]["name"] for call in parser.message["tool_calls"]] == ["f"] and parser.finish_reason == "tool_calls"


def test_an_unfinished_character_ends_with_its_channel(tokenizer):
    first, *rest = as_bytes(tokenizer, tokenizer.encode("你"))
    ids = [first, *write(tokenizer, "<|close|>think<|sep|><|open|>response<|sep|>"), *rest, *tokenizer.encode("a")]
    message = run(tokenizer, ids, (1,))[0].message
    assert message == {"role": "assistant", "reasoning_content": "\ufffd", "content": "\ufffd\ufffda"}


def test_text_after_a_stray_control_token_is_not_lost(tokenizer):
    ids = write(tokenizer, "a<|close|>foo b<|sep|>c[PAD]d<|open|>callback e")
    assert run(tokenizer, ids, (1,), thinking=False)[0].message["content"] == "afoo bcdcallback e"


def test_a_header_is_held_back_until_it_is_decided(tokenizer):
    parser = ChatParser(tokenizer, thinking=False)
    assert [event.text for event in parser.feed(write(tokenizer, "Yes<|close|>resp"))] == ["Yes"]
    assert [event.text for event in parser.feed(tokenizer.encode("x!"))] == ["respx!"]


def test_arguments_flow_as_they_arrive(tokenizer):
    parser = ChatParser(tokenizer, call_id=lambda index, name: f"{name}:{index}")
    start = write(tokenizer, '<|open|>tools<|sep|><|open|>call tool="a &quot;b&quot; <c>" index="1"<|sep|>')
    assert [(e.kind, e.index, e.id, e.name) for e in parser.feed(start)] == [("tool_call", 0, 'a "b" <c>:0', 'a "b" <c>')]
    assert [e.text for e in parser.feed(write(tokenizer, '<|open|>argument key="s" type="string"<|sep|>'))] == ['{"s": "']
    assert [e.text for e in parser.feed(tokenizer.encode('x"\n'))] == ['x\\"\\n']
    assert parser.channel == "argument"
    assert [e.text for e in parser.feed(write(tokenizer, '<|close|>argument<|sep|><|open|>argument key="o" type="object"<|sep|>{"k"'))] == [
        '", "o": {"k"'
    ]
    events = parser.feed(write(tokenizer, ": 1}<|close|>argument<|sep|><|close|>call<|sep|>"))
    assert [(e.kind, e.text) for e in events] == [("arguments", ": 1}}"), ("tool_call_end", "")]
    assert json.loads(parser.message["tool_calls"][0]["function"]["arguments"]) == {"s": 'x"\n', "o": {"k": 1}}


@pytest.mark.parametrize(
    "cut",
    ['<|open|>call tool="g', '<|open|>call tool="g" index="2"', '<|open|>call tool="g" index="2"<|sep|>',
     '<|open|>call tool="g" index="2"<|sep|><|open|>argument key="x',
     '<|open|>call tool="g" index="2"<|sep|><|open|>argument key="x" type="string"<|sep|>par',
     '<|open|>call tool="g" index="2"<|sep|><|open|>argument key="x" type="string"<|sep|>part<|close|>argument<|sep|>', "<|open|>", ""],
)  # fmt: skip
def test_a_truncated_stream_keeps_complete_calls_only(tokenizer, cut):
    ids = write(tokenizer, "Hm.<|open|>tools<|sep|>" + CALL_F + cut)
    for reason, expected in {"length": "length", "stop": "tool_calls"}.items():
        parser, events = run(tokenizer, ids, (3,), reason=reason)
        begun = [event.name for event in events if event.kind == "tool_call"]
        assert begun == (["f", "g"] if "<|sep|>" in cut else ["f"])
        assert [call["function"]["name"] for call in parser.message["tool_calls"]] == ["f"] and parser.finish_reason == expected


def test_truncated_thinking_has_reasoning_and_empty_content(tokenizer):
    parser, _ = run(tokenizer, write(tokenizer, "Hm, well<|close|>thi"), reason="length")
    assert parser.message == {"role": "assistant", "reasoning_content": "Hm, well", "content": ""} and parser.finish_reason == "length"
    assert parser.reasoning_tokens == len(tokenizer.encode("Hm, well"))


def test_a_limit_after_the_end_is_no_truncation(tokenizer):
    assert run(tokenizer, write(tokenizer, "Yes" + END), thinking=False, reason="length")[0].finish_reason == "stop"


def test_both_stop_tokens_end_the_message(tokenizer):
    for id in (tokenizer.eos_id, tokenizer.end_of_msg_id):
        parser = ChatParser(tokenizer, thinking=False)
        events = parser.feed([*tokenizer.encode("Yes"), id, *tokenizer.encode("more")])
        assert [(e.kind, e.text or e.reason) for e in events] == [("content", "Yes"), ("done", "stop")]


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("", "{}"),
        ('<|open|>json type="object"<|sep|>{"a": <|close|>json<|sep|>', '{"a": '),
        ('<|open|>json type="object"<|sep|><|close|>json<|sep|>', "{}"),
        ('<|open|>json type="object"<|sep|>[<|open|>argument key="a" type="null"<|sep|>null<|close|>argument<|sep|>', "["),
        # a closing tag that is missing; one that isn't for what is open; a type or a key that is missing
        ('<|open|>argument key="a" type="string"<|sep|>x<|open|>argument key="b" type="null"<|sep|>null', '{"a": "x", "b": null}'),
        ('<|open|>argument key="a" type="string"<|sep|>x<|close|>response<|sep|>y<|close|>argument<|sep|>', '{"a": "xy"}'),
        ('<|open|>argument key="a"<|sep|>1<|close|>argument<|sep|>', '{"a": "1"}'),
        ('<|open|>argument type="number"<|sep|>1<|close|>argument<|sep|>', "{}"),
        ('junk<|open|>argument key="a&amp;b" type="array"<|sep|>[1]<|close|>argument<|sep|>junk', '{"a&b": [1]}'),
        ('<|open|>argument key="a" type="number"<|sep|>1<|open|>json type="object"<|sep|>{}<|close|>json<|sep|>', '{"a": 1}'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["<|close|>call<|sep|><|close|>tools<|sep|>" + END, "<|close|>tools<|sep|>" + END, END])
def test_arguments_of_well_and_badly_formed_calls(tokenizer, inside, arguments, end):
    text = f'<|open|>tools<|sep|><|open|>call tool="g" index="1"<|sep|>{inside}{end}'
    message = run(tokenizer, write(tokenizer, text), (1,))[0].message
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "g", "arguments": arguments}]


def test_a_call_without_a_name_is_skipped_with_what_is_in_it(tokenizer):
    unnamed = '<|open|>call index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>x<|close|>argument<|sep|><|close|>call<|sep|>'
    message = parse_message(tokenizer, write(tokenizer, f"<|open|>tools<|sep|>{unnamed}{CALL_F}<|close|>tools<|sep|>{END}"))
    assert message == {
        "role": "assistant",
        "reasoning_content": "",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }


def test_a_continued_message_is_parsed_from_where_the_prompt_stops(tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It ", "partial": True}]
    parser, _ = run(tokenizer, write(tokenizer, "is.<|close|>response<|sep|>" + END), channel=generation_channel(messages))
    assert parser.message == {"role": "assistant", "reasoning_content": "", "content": "is."}


def test_parsers_share_nothing(tokenizer):
    one, two = ChatParser(tokenizer), ChatParser(tokenizer)
    one.feed(write(tokenizer, "secret<|open|>tools<|sep|>" + CALL_F))
    two.finish()
    assert two.message == {"role": "assistant", "reasoning_content": "", "content": ""}
