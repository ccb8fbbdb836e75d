"""Text in and out of the model: the tokenizer, the XTML chat format, and the parser of what the model writes. No torch."""

from openk3.text.chat import Segment, generation_channel, render
from openk3.text.instructions import Instructions
from openk3.text.parse import ChatParser, Event, parse_message
from openk3.text.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "ChatParser",
    "Event",
    "Instructions",
    "Segment",
    "StreamDecoder",
    "Tokenizer",
    "generation_channel",
    "parse_message",
    "render",
]
