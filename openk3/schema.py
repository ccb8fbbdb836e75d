"""Strict frozen dataclasses for JSON objects: what `config.py` builds its tree from.

A `Level` is one JSON object. Its fields are typed, required unless they have a default, and checked however the object is made (file,
constructor, `dataclasses.replace`). Hugging Face's bookkeeping fields are kept in `extra`, verbatim, and written back; any other
unknown field is an error that names the nearest known one.
"""

import contextlib
import dataclasses
import difflib
import functools
import json
import math
import os
import types
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self, Union, get_args, get_origin, get_type_hints

from openk3.errors import UserError

# Written by Hugging Face's config classes at any level; none of them changes what the model computes.
BOOKKEEPING = frozenset(
    """architectures transformers_version auto_map dtype torch_dtype use_cache model_max_length head_dim rope_scaling rope_parameters
    _name_or_path name_or_path _commit_hash _attn_implementation attn_implementation _attn_implementation_autoset _experts_implementation
    attention_dropout output_router_logits router_aux_loss_coef aux_loss_alpha seq_aux pretraining_tp ep_size gradient_checkpointing
    chunk_size_feed_forward is_encoder_decoder is_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder
    output_hidden_states output_attentions return_dict return_dict_in_generate torchscript use_bfloat16 tf_legacy_loss pruned_heads
    problem_type id2label label2id num_labels finetuning_task task_specific_params prefix tokenizer_class unk_token_id sep_token_id
    decoder_start_token_id max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty license""".split()
)
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string", types.NoneType: "null"}


class FrozenDict(Mapping[str, Any]):
    """A hashable mapping for JSON objects that are only carried along; lists inside it are tuples."""

    def __init__(self, items: Mapping[str, Any] | None = None):
        self._items = {key: freeze(value) for key, value in (items or {}).items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return FrozenDict(value)
    return tuple(map(freeze, value)) if isinstance(value, list | tuple) else value


def thaw(value: Any) -> Any:
    if isinstance(value, Level):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: thaw(v) for key, v in value.items()}
    return [thaw(v) for v in value] if isinstance(value, tuple) else value


def if_changed(default: Any) -> Any:
    """A field that is written only where it differs from its default."""
    return field(default=default, metadata={"write": "changed"})


def variant(default: Any) -> Any:
    """A field that Kimi Linear doesn't know: a flat config writes it only where it differs from the default."""
    return field(default=default, metadata={"write": "unless flat"})


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(cls).items() if get_origin(hint) is not ClassVar}


def _coerce(value: Any, hint: Any, path: str) -> Any:
    """The JSON value as the field's type (lists become tuples, integers floats where a float stands); `UserError` where it can't be."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    wanted = []
    for option in options:
        wanted.append(_TYPE_NAMES.get(option) or ("a list of integers" if get_origin(option) is tuple else "an object"))
        if option in (int, float) and isinstance(value, bool):
            continue
        if option in (types.NoneType, bool, int, str):
            if isinstance(value, option):
                return value
        elif option is float:
            if isinstance(value, float) and math.isfinite(value) or isinstance(value, int) and abs(value) < 2**53:
                return float(value)
        elif get_origin(option) is tuple:
            if isinstance(value, list | tuple) and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
                return tuple(value)
        elif isinstance(value, option):
            return value
        elif isinstance(value, Mapping):
            return FrozenDict(value) if option is FrozenDict else option.from_dict(value)  # type: ignore[union-attr]
    raise UserError(f"{path} must be {' or '.join(wanted)}, not {_short(value)}")


def _short(value: Any) -> str:
    text = json.dumps(thaw(value), default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


class Level:
    """One JSON object of the config. Every way to make one (file, constructor, replace) passes the same checks."""

    _path: ClassVar[str] = ""  # what stands before a field's name in messages: "text_config."
    extra: FrozenDict

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            object.__setattr__(self, name, _coerce(getattr(self, name), hint, self._path + name))
        for name in self.extra:
            if name not in BOOKKEEPING:
                self._unknown(name)
        self._check()

    def _check(self) -> None: ...

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        """Reads one JSON object. Raises `UserError` for an unknown, missing, wrongly typed or impossible field."""
        names = {f.name: f for f in dataclasses.fields(cls) if f.name != "extra"}  # type: ignore[arg-type]
        extra = {key: value for key, value in d.items() if key not in names}
        for key in extra:
            if key not in BOOKKEEPING:  # first: a misspelt field is also a missing one, and this says more
                cls._unknown(key)
        for name, f in names.items():
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and name not in d:
                raise UserError(f"{cls._path}{name} is missing: this field is required")
        return cls(**{key: d[key] for key in names if key in d}, extra=FrozenDict(extra))  # type: ignore[call-arg]

    def to_dict(self) -> dict[str, Any]:
        """The JSON object, with lists for tuples: standard fields written out, `if_changed` ones only where they differ."""
        return self.written()

    def written(self, flat: bool = False) -> dict[str, Any]:
        d = dict(thaw(self.extra))
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value, when = getattr(self, f.name), f.metadata.get("write")
            if f.name == "extra" or (when == "changed" or when == "unless flat" and flat) and value == f.default:
                continue
            d[f.name] = value.written(flat) if isinstance(value, Level) else thaw(value)
        return d

    def replace(self, **changes: Any) -> Self:
        """A copy with other fields, checked like any other. Raises `UserError` for a name that isn't one."""
        for name in changes:
            if name not in _hints(type(self)):
                self._unknown(name)
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    @classmethod
    def _unknown(cls, name: str) -> NoReturn:
        level = cls._path.rstrip(".") or "the top level"
        for other in Level.__subclasses__():
            if other is not cls and name in _hints(other):
                raise UserError(f"{cls._path}{name}: unknown field in {level}; it belongs in {other._path.rstrip('.') or 'the top level'}")
        name = str(name)
        near = difflib.get_close_matches(name, sorted(_hints(cls).keys() - {"extra"} | BOOKKEEPING), n=1, cutoff=0.0)[0]
        shown = name if name.isidentifier() else _short(name)
        raise UserError(f"{cls._path}{shown}: unknown field in {level}; the nearest known one is '{near}'")

    def _fail(self, name: str, problem: str) -> NoReturn:
        raise UserError(f"{self._path}{name} is {_short(getattr(self, name))}: {problem}")

    def _at_least(self, minimum: float, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < minimum:
                self._fail(name, f"it must be at least {minimum}")

    def _above_zero(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value <= 0:
                self._fail(name, "it must be above 0")

    def _one_of(self, name: str, *choices: Any) -> None:
        if getattr(self, name) not in choices:
            self._fail(name, f"it must be {' or '.join(map(_short, choices))}")


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises `UserError` when it's missing, unreadable or broken; the caller adds the path."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except FileNotFoundError:
        raise UserError("no such file; a model folder holds a config.json") from None
    except OSError as e:
        raise UserError(f"can't read it: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"not valid JSON: {e}") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def write_json(path: Path, value: Any) -> Path:
    """Writes a JSON file aside and renames it, so that a half-written one never stands. Raises `UserError` where the disk refuses."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(aside, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise UserError(f"{path}: can't write it: {e.strerror or e}") from None
    return path
