"""What counts as Python up to the last whole statement, and which prompts are drawn."""

import pytest

from openk3.train.samples import code_prompts, parses_as_python


@pytest.mark.parametrize("text", [
    "x = 1\ny = (2,\n 3", "def f(x):\n    return x\n\ndef g(", "def f(x):\n", "def f(x):\n    try:\n        a()\n",
    "class A:\n    def f(self):\n        '''doc\n        never ends", "try:\n    a\nexcept X:\n    b\nfoo(", "if x:\n    y\nelse:\n",
    "a=1\n@dec\ndef", "a\n", "with a as b:\n    try:\n        x\n    except A:\n        y\n    z\n", "x = [1,\n  2]\nif a:\n    pass\n",
])
def test_a_text_that_was_cut_parses(text):
    assert parses_as_python(text)


@pytest.mark.parametrize("text", [
    "def f(x)\n    return\n",
    "x = = 1\ny=2\n", "@dec\n", "  x=1\ny=2\n", "def f():\n    x = 'abc\n    y = 1\n", "for x in y:\n    z\n  w\n",
    "x)\ny\n", "", "def f():\nreturn 1\n", "x = 1\nx +\ny = 2\n", "print 'hello'\nx = 1\n",
])
def test_a_text_that_is_wrong_does_not(text):
    assert not parses_as_python(text)


def test_prompts_end_where_something_begins():
    text = "import os\n\n\ndef first(a):\n    return a\n\n\ndef second(b):\n    return b\n"
    assert code_prompts([("m.py", text)], 1) == [text[: text.index("second(b):") + len("second(b):\n")]]
    assert code_prompts([("m.py", text)], 1, longest=40) == [text[: text.index("first(a):") + len("first(a):\n")]]
    assert code_prompts([("a.txt", "just words\nand more\n")], 3) == ["just words\nand more\n"]
    assert len(code_prompts([(f"{n}.py", text) for n in range(10)], 4)) == 4
