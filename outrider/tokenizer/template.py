"""Chats by the checkpoint's own jinja template, run in a sandbox.

A template writes structure and the caller's text into one string. So that no text can become structure, every name
of a control token inside the caller's text is replaced by a placeholder before rendering; afterwards the string is
cut at the placeholders, what the template wrote is encoded with control tokens on, and each placeholder as plain text.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from outrider.errors import RequestError, TokenizerError
from outrider.tokenizer.base import Tokenizer
from outrider.tokenizer.files import read_json_object
from outrider.tokenizer.messages import parse_messages

__all__ = ["ChatTemplate", "read_template"]

TEMPLATE_FILE = "chat_template.jinja"
# Template variables that name a token, as tokenizer_config.json spells them.
TOKEN_VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token")
PRIVATE_USE = range(0xE000, 0xF900)


class ChatTemplate:
    """A compiled template and the token names that it may write.

    Args:
        source: jinja text.
        variables: names of special tokens, by the variable that the template reads.

    Raises:
        TokenizerError: the text is no template.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        import jinja2  # noqa: PLC0415 - only checkpoints with a template pay for it
        from jinja2.ext import loopcontrols  # noqa: PLC0415
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

        # Blocks and blanks as the field's templates expect them.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        self._error = jinja2.TemplateError
        self._variables = dict(variables)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template of the checkpoint is no jinja template: {error}") from error

    def render(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, object]],
        *,
        thinking: bool,
        add_generation_prompt: bool,
    ) -> list[int]:
        """Token ids of a chat.

        Args:
            tokenizer: of the same checkpoint.
            messages: see `outrider.tokenizer.messages.parse_messages`.
            thinking: handed over as `enable_thinking`, as Qwen3's template reads it.
            add_generation_prompt: end with an opened assistant message, if the template has one.

        Raises:
            RequestError: malformed messages, or the template refuses them.
        """
        parse_messages(messages)
        names = [
            name
            for name in tokenizer.special_token_ids
            if tokenizer.special_token_id(name) in tokenizer.control_token_ids
        ]
        shield = _Shield(names, messages)
        try:
            text = self._template.render(
                messages=[_joined_content(message) for message in shield.cover(messages)],
                add_generation_prompt=add_generation_prompt,
                enable_thinking=thinking,
                tools=None,
                **self._variables,
            )
        except RequestError:
            raise
        except (self._error, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise RequestError(f"the chat template of the checkpoint cannot render these messages: {error}") from error
        token_ids: list[int] = []
        for part, is_text in shield.split(text):
            token_ids.extend(tokenizer.encode(part, allow_special=not is_text))
        return token_ids


def read_template(folder: Path, tokenizer_config: Mapping[str, object]) -> ChatTemplate | None:
    """The template of a checkpoint: `chat_template.jinja`, else `chat_template` of tokenizer_config.json.

    A list of named templates gives the one called `default`.

    Raises:
        TokenizerError: the field is neither text nor such a list, or the text is no template.
    """
    file = folder / TEMPLATE_FILE
    if file.is_file():
        try:
            source: object = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{file.name} cannot be read ({error}); restore the file") from error
    else:
        source = tokenizer_config.get("chat_template")
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise TokenizerError(
            f"chat_template in tokenizer_config.json is {type(source).__name__}; expected text or a list that has a "
            "template named 'default'"
        )
    return ChatTemplate(source, _token_variables(folder, tokenizer_config))


def _token_variables(folder: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """Names of the special tokens; special_tokens_map.json fills in what the config leaves out."""
    fallback = folder / "special_tokens_map.json"
    places = [tokenizer_config, read_json_object(fallback) if fallback.is_file() else {}]
    found: dict[str, str] = {}
    for variable in TOKEN_VARIABLES:
        for place in places:
            value = place.get(variable)
            name = value.get("content") if isinstance(value, dict) else value
            if isinstance(name, str):
                found.setdefault(variable, name)
    return found


class _Shield:
    """Placeholders for control-token names inside the caller's text.

    They are private-use characters that occur nowhere in the messages, so no text can be one by itself.
    """

    def __init__(self, names: Collection[str], messages: Sequence[Mapping[str, object]]) -> None:
        # Longest first: a name that begins with another one is taken whole.
        self._names = sorted(names, key=len, reverse=True)
        used = set(json.dumps(messages, ensure_ascii=False, default=str))
        mark = next(chr(code) for code in PRIVATE_USE if chr(code) not in used)
        self._mark = mark
        self._name = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._placeholder = re.compile(f"{mark}([0-9]+){mark}")
        self._index = {name: index for index, name in enumerate(self._names)}

    def cover(self, messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        """The messages with every name in every text, nested keys included, replaced."""
        return [{key: self._covered(value) for key, value in message.items()} for message in messages]

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """Parts of a rendered text in order, and whether each is the caller's name of a control token."""
        end = 0
        for match in self._placeholder.finditer(text):
            if match.start() > end:
                yield text[end : match.start()], False
            yield self._names[int(match.group(1))], True
            end = match.end()
        if end < len(text):
            yield text[end:], False

    def _covered(self, value: object) -> object:
        if isinstance(value, str):
            return self._name.sub(lambda match: f"{self._mark}{self._index[match.group()]}{self._mark}", value)
        if isinstance(value, Mapping):
            return {self._covered(key): self._covered(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self._covered(item) for item in value]
        return value


def _joined_content(message: dict[str, object]) -> dict[str, object]:
    """A message whose list of text parts is one text: most templates know text only."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": "".join(str(part["text"]) for part in content)}
    return {**message, "content": content or ""}


def _refuse(message: object) -> None:
    raise RequestError(f"the chat template of the checkpoint refuses these messages: {message}")


def _to_json(value: object, indent: int | None = None) -> str:
    """Plain JSON: jinja's own filter escapes for HTML, which a model was never trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
