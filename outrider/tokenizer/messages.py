"""Chat messages as they come from a caller, checked and turned into records."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.errors import RequestError, UnsupportedError

__all__ = ["ChatMessage", "ToolArgument", "ToolCall", "parse_messages"]

ROLES = ("system", "user", "assistant", "tool")
_KEYS_OF_ROLE = {
    "system": {"name"},
    "user": {"name"},
    "assistant": {"name", "reasoning_content", "tool_calls"},
    "tool": {"name", "tool_call_id"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolArgument:
    """One argument of a call: its JSON type and its text, verbatim for a string, else compact JSON."""

    key: str
    json_type: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call in an assistant message. `call_id` is the caller's handle and is not rendered."""

    call_id: str | None
    name: str
    arguments: tuple[ToolArgument, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message. `content` and `reasoning` are plain text; "" where absent."""

    role: str
    content: str
    name: str | None
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    tool_call_id: str | None


def parse_messages(messages: Sequence[Mapping[str, object]]) -> tuple[ChatMessage, ...]:
    """Check chat messages in the shape of the OpenAI API.

    Every message has a `role` and a `content` (text, None, or a list of text parts). Any may have a
    `name`; an assistant message may have `reasoning_content` and `tool_calls`, a tool message
    `tool_call_id`. Keys whose value is None count as absent.

    Raises RequestError, naming the message and the key, for anything else, and UnsupportedError for
    content that is not text.
    """
    if not messages:
        raise RequestError("messages is empty; pass at least 1 message")
    return tuple(_parse_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _parse_message(message: Mapping[str, object], where: str) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {type(message).__name__}, not an object with a role and a content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{where}.role={role!r} is not one of {', '.join(ROLES)}; correct the role")
    allowed = {"role", "content"} | _KEYS_OF_ROLE[role]
    unknown = sorted(str(key) for key, value in message.items() if key not in allowed and value is not None)
    if unknown:
        raise RequestError(
            f"{where} has keys {unknown} that a {role} message cannot carry; remove them, allowed are {sorted(allowed)}"
        )
    return ChatMessage(
        role=role,
        content=_content_text(message.get("content"), f"{where}.content"),
        name=_optional_text(message.get("name"), f"{where}.name"),
        reasoning=_optional_text(message.get("reasoning_content"), f"{where}.reasoning_content") or "",
        tool_calls=_parse_tool_calls(message.get("tool_calls"), f"{where}.tool_calls"),
        tool_call_id=_optional_text(message.get("tool_call_id"), f"{where}.tool_call_id"),
    )


def _optional_text(value: object, where: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{where} is {type(value).__name__}; pass text")
    return value


def _content_text(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} is {type(content).__name__}; pass text or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise RequestError(f"{where}[{index}] is {type(part).__name__}; pass an object with type and text")
        if part.get("type") != "text":
            raise UnsupportedError(f"{where}[{index}].type={part.get('type')!r} is not supported; pass text parts only")
        text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(f"{where}[{index}].text is {type(text).__name__}; pass text")
        texts.append(text)
    return "".join(texts)


def _parse_tool_calls(calls: object, where: str) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{where} is {type(calls).__name__}; pass a list")
    parsed = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
            raise RequestError(f"{where}[{index}] has no function with a name; pass id, type and function")
        parsed.append(
            ToolCall(
                call_id=_optional_text(call.get("id"), f"{where}[{index}].id"),
                name=name,
                arguments=_parse_arguments(function.get("arguments"), f"{where}[{index}].function.arguments"),
            )
        )
    return tuple(parsed)


def _parse_arguments(arguments: object, where: str) -> tuple[ToolArgument, ...]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} is not JSON ({error}); pass a JSON object") from error
    if arguments is None:
        return ()
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where} is {type(arguments).__name__}; pass a JSON object")
    return tuple(_tool_argument(str(key), value) for key, value in arguments.items())


def _tool_argument(key: str, value: object) -> ToolArgument:
    if isinstance(value, str):
        return ToolArgument(key=key, json_type="string", text=value)
    if value is None:
        json_type = "null"
    elif isinstance(value, bool):
        json_type = "boolean"
    elif isinstance(value, int | float):
        json_type = "number"
    else:
        json_type = "object" if isinstance(value, Mapping) else "array"
    return ToolArgument(key=key, json_type=json_type, text=json.dumps(value, ensure_ascii=False, separators=(",", ":")))
