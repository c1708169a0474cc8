"""The K3 chat format, written segment by segment.

Markers are placed by id. Everything else, whether tag names, attributes or the caller's text, is encoded
with control tokens off, one segment at a time, so no text can become structure.
"""

from collections.abc import Mapping, Sequence

from outrider.errors import RequestError, UnsupportedError
from outrider.tokenizer.base import Tokenizer
from outrider.tokenizer.messages import ChatMessage, ToolCall, parse_messages

__all__ = ["answer_stop_ids", "has_k3_markers", "render_k3_chat"]

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MESSAGE = "<|end_of_msg|>"
MARKERS = (OPEN, CLOSE, SEP, END_OF_MESSAGE)


def has_k3_markers(tokenizer: Tokenizer) -> bool:
    """Whether chats of this tokenizer are in the K3 format."""
    return tokenizer.special_token_ids.keys() >= set(MARKERS)


def render_k3_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    *,
    thinking: bool,
    add_generation_prompt: bool,
    effort_message: str | None,
) -> list[int]:
    """Token ids of a chat.

    Args:
        tokenizer: must have the four K3 markers among its added tokens.
        messages: see `outrider.tokenizer.messages.parse_messages`.
        thinking: keep the think channel of earlier turns and open one for the next; needs the
            checkpoint's effort message.
        add_generation_prompt: end with an opened assistant message, ready for the model to go on.
        effort_message: text of the thinking-effort message, or None when the checkpoint has none.

    Raises:
        UnsupportedError: a marker is missing, or `thinking` without an effort message.
        RequestError: malformed messages, or a tool message whose tool is unknown.
    """
    writer = _SegmentWriter(tokenizer)
    if thinking:
        if effort_message is None:
            raise UnsupportedError(
                "thinking=True needs the thinking-effort message of the checkpoint, which was not found as one "
                "literal string in encoding_k3.py; pass thinking=False or add that file to the checkpoint"
            )
        writer.open_tag("message", (("role", "system"), ("type", "thinking-effort")))
        writer.text(effort_message)
        writer.end_message()
    calls: tuple[ToolCall, ...] = ()
    num_results = 0
    for message in _in_call_order(parse_messages(messages)):
        if message.role == "assistant":
            calls, num_results = message.tool_calls, 0
            _write_assistant(writer, message, thinking=thinking)
        elif message.role == "tool":
            num_results += 1
            _write_tool_result(writer, message, calls, num_results)
        else:
            writer.open_tag("message", _role_attributes(message))
            writer.text(message.content)
            writer.end_message()
    if add_generation_prompt:
        writer.open_tag("message", (("role", "assistant"),))
        writer.open_tag("think" if thinking else "response")
    return writer.token_ids


def answer_stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end an answer to a prompt rendered without thinking.

    Such an answer is the rest of the response channel, which the next `<|close|>` ends; what follows
    it only closes the message. In other formats an answer ends with the checkpoint's own stop ids.
    """
    return (tokenizer.special_token_id(CLOSE),) if has_k3_markers(tokenizer) else ()


class _SegmentWriter:
    """Collects token ids of markers and of text segments."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.token_ids: list[int] = []
        self._tokenizer = tokenizer
        named = tokenizer.special_token_ids
        missing = [name for name in MARKERS if name not in named]
        if missing:
            raise UnsupportedError(
                f"the tokenizer has no {', '.join(missing)} token, which the K3 chat format needs, and "
                "the checkpoint has no chat template; send a plain prompt, or use a checkpoint with one of them"
            )
        self._open, self._close, self._sep = named[OPEN], named[CLOSE], named[SEP]
        self._end_of_message = named[END_OF_MESSAGE]

    def text(self, text: str) -> None:
        if text:
            self.token_ids.extend(self._tokenizer.encode(text))

    def open_tag(self, tag: str, attributes: Sequence[tuple[str, str]] = ()) -> None:
        self.token_ids.append(self._open)
        self.text(tag)
        for key, value in attributes:
            # Four segments, as the checkpoint's own renderer has them; joined, BPE could merge across.
            self.text(f" {key}")
            self.text('="')
            self.text(value.replace("&", "&amp;").replace('"', "&quot;"))
            self.text('"')
        self.token_ids.append(self._sep)

    def close_tag(self, tag: str) -> None:
        self.token_ids.append(self._close)
        self.text(tag)
        self.token_ids.append(self._sep)

    def element(self, tag: str, text: str, attributes: Sequence[tuple[str, str]] = ()) -> None:
        self.open_tag(tag, attributes)
        self.text(text)
        self.close_tag(tag)

    def end_message(self) -> None:
        self.close_tag("message")
        self.token_ids.append(self._end_of_message)


def _role_attributes(message: ChatMessage) -> list[tuple[str, str]]:
    attributes = [("role", message.role)]
    if message.name is not None:
        attributes.append(("name", message.name))
    return attributes


def _write_assistant(writer: _SegmentWriter, message: ChatMessage, *, thinking: bool) -> None:
    writer.open_tag("message", _role_attributes(message))
    if thinking:
        writer.element("think", message.reasoning)
    writer.element("response", message.content)
    if message.tool_calls:
        writer.open_tag("tools")
        for index, call in enumerate(message.tool_calls, start=1):
            writer.open_tag("call", (("tool", call.name), ("index", str(index))))
            for argument in call.arguments:
                writer.element("argument", argument.text, (("key", argument.key), ("type", argument.json_type)))
            writer.close_tag("call")
        writer.close_tag("tools")
    writer.end_message()


def _write_tool_result(writer: _SegmentWriter, message: ChatMessage, calls: Sequence[ToolCall], index: int) -> None:
    """Write result number `index`, counted from 1, of the latest assistant message's `calls`."""
    name_by_id = {call.call_id: call.name for call in reversed(calls) if call.call_id is not None}
    name = name_by_id.get(message.tool_call_id or "", message.name)
    if name is None and index <= len(calls):
        name = calls[index - 1].name
    if name is None:
        raise RequestError(
            f"tool result {index} with tool_call_id={message.tool_call_id!r} belongs to no call of the latest "
            "assistant message; pass the tool_call_id of a call, or a name"
        )
    writer.open_tag("message", (("role", "tool"), ("tool", name), ("index", str(index))))
    writer.text(message.content)
    writer.end_message()


def _in_call_order(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Sort each run of tool results by the order of the calls, when every result names its call."""
    ordered: list[ChatMessage] = []
    run: list[ChatMessage] = []
    position: dict[str, int] = {}
    for message in messages:
        if message.role == "tool":
            run.append(message)
            continue
        ordered.extend(_sorted_run(run, position))
        run = []
        if message.role == "assistant":
            ids = [call.call_id for call in message.tool_calls]
            position = {call_id: ids.index(call_id) for call_id in ids if call_id is not None}
        ordered.append(message)
    return ordered + _sorted_run(run, position)


def _sorted_run(run: Sequence[ChatMessage], position: Mapping[str, int]) -> list[ChatMessage]:
    places = [position.get(message.tool_call_id or "") for message in run]
    if None in places:
        return list(run)
    return [message for _, message in sorted(zip(places, run, strict=True), key=lambda item: item[0] or 0)]
