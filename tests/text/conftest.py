"""One small tokenizer for all tests of text."""

import pytest

from openk3.text import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the model writes what it thinks.\n" * 8,
    'def f(x: int) -> str:\n    """Doc."""\n    return f"{x}"\n\n\nclass A:\n        pass\n' * 8,
    'message role="assistant" think response tools call tool="get_weather" index="1" argument key="city" type="string"\n' * 8,
    "Ein Bär aß Äpfel. 你好世界，你好。 Привет, мир! 1234567 890\r\n\r\n\t\t" * 8,
]


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    return CORPUS


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(CORPUS, 440)
