import hashlib
import json
from dataclasses import asdict, replace

import pytest

from openk3.errors import UserError
from openk3.text import Instructions
from openk3.text import instructions as module


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_checkpoint_keeps_its_wording(tmp_path):
    assert Instructions.load(tmp_path) == Instructions()
    own = replace(Instructions(), thinking_effort="Think {effort}ly, naïvely.\n")
    path = own.save(tmp_path)
    assert Instructions.load(tmp_path) == own and list(tmp_path.iterdir()) == [path]


def test_a_bad_wording_file_is_told_in_one_line(tmp_path):
    words = asdict(Instructions())
    path = tmp_path / "chat_instructions.json"
    for text in ("{", "[]", json.dumps(words | {"more": ""}), json.dumps(words | {"tools": 1}), json.dumps({"tools": ""})):
        path.write_text(text)
        with pytest.raises(UserError, match=r"chat_instructions\.json") as caught:
            Instructions.load(tmp_path)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="can't write"):
        Instructions().save(tmp_path / "none")


SOURCE = """
raise RuntimeError("read, never run")
def declare(tools, dynamic):
    return f"More:\\n```json\\n{dump(tools)}\\n```" if dynamic else ("Tools\\n" f"```json\\n{dump(tools)}\\n```")
effort = ("Effort is a word.\\n"
          f"It is `{thinking_effort}` now.")
choice = "Must call." if required else "Must not."
form = "Only JSON.\\n"
schema = ("`response_format=json_schema`, "
          f"namely\\n```json\\n{schema}\\n```")
"""


@pytest.fixture
def digests(monkeypatch):
    """Stand-ins for the released sentences."""
    for effort in module.EFFORTS:
        monkeypatch.setitem(module._EFFORT_DIGESTS, effort, sha(f"Effort is a word.\nIt is `{effort}` now."))
    for name, find, text in [
        ("tools", module._before_fence, "Tools\n"),
        ("dynamic_tools", module._before_fence, "More:\n"),
        ("tool_choice_required", module._whole, "Must call."),
        ("tool_choice_none", module._whole, "Must not."),
        ("json_object", module._whole, "Only JSON."),
    ]:
        monkeypatch.setitem(module._RELEASED, name, find(sha(text)))


def test_the_released_encoder_s_sentences_are_found_by_digest(tmp_path, digests):
    (tmp_path / "encoding_k3.py").write_text(SOURCE)
    assert Instructions.load(tmp_path) == Instructions(
        tools="Tools\n",
        dynamic_tools="More:\n",
        thinking_effort="Effort is a word.\nIt is `{effort}` now.",
        tool_choice_required="Must call.",
        tool_choice_none="Must not.",
        json_object="Only JSON.",
        json_schema="`response_format=json_schema`, namely\n",
    )


def test_another_wording_in_the_released_encoder_is_refused(tmp_path, digests):
    path = tmp_path / "encoding_k3.py"
    for text, message in {SOURCE.replace("Must not", "Mustn't"): "tool_choice_none", "def (": "as Python"}.items():
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            Instructions.load(tmp_path)


def test_a_released_vocabulary_without_wording_is_an_error_rather_than_another_prompt(tmp_path):
    (tmp_path / "tiktoken.model").write_text("")
    with pytest.raises(UserError, match=r"encoding_k3\.py"):
        Instructions.load(tmp_path)
