"""Text constants read out of a checkpoint's Python files, as syntax trees; nothing is executed."""

import ast
import re
from pathlib import Path

from outrider.errors import TokenizerError

__all__ = ["read_effort_message", "read_split_pattern"]

EFFORT_PREFIX = "`thinking_effort` guides"
_PLACEHOLDER = re.compile(r"\{[A-Za-z_]\w*\}")


def read_split_pattern(path: Path) -> str:
    """The string assigned to `pat_str` in the Python file `path`.

    Plain strings, their sums and `"sep".join([...])` of strings are understood. Raises TokenizerError
    when the file cannot be parsed, or does not hold exactly one such string.
    """
    values = set()
    for node in ast.walk(_parse(path)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(_target_name(target) == "pat_str" for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign), "only assignments have targets"
            value = None if node.value is None else _literal_text(node.value)
            if value is not None:
                values.add(value)
    if len(values) != 1:
        raise TokenizerError(
            f"{path.name} assigns pat_str to {len(values)} literal strings, exactly 1 is needed; "
            "remove the file to use the built-in K3 pattern"
        )
    return values.pop()


def read_effort_message(path: Path, effort: str) -> str | None:
    """The thinking-effort message of the Python file `path` with `effort` filled in.

    The message is a literal that starts with "`thinking_effort` guides", or an f-string or template
    with one placeholder. Returns None when the file does not hold exactly one. Raises TokenizerError
    when the file cannot be parsed.
    """
    templates: set[str] = set()
    _collect_effort_templates(_parse(path), templates)
    if len(templates) != 1:
        return None
    template = templates.pop()
    if len(_PLACEHOLDER.findall(template)) > 1:
        return None
    message = _PLACEHOLDER.sub(effort, template).strip()
    return None if "{" in message or "%s" in message else message


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=path.name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TokenizerError(
            f"{path.name} cannot be parsed as Python ({error}); restore the file or remove it"
        ) from error


def _target_name(target: ast.expr) -> str | None:
    if isinstance(target, ast.Name):
        return target.id
    return target.attr if isinstance(target, ast.Attribute) else None


def _literal_text(node: ast.expr) -> str | None:
    """The value of a string expression made of literals only, else None."""
    match node:
        case ast.Constant(value=str() as value):
            return value
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _concatenation([left, right], "")
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str() as separator), attr="join"),
            args=[ast.List(elts=parts) | ast.Tuple(elts=parts)],
            keywords=[],
        ):
            return _concatenation(parts, separator)
    return None


def _concatenation(nodes: list[ast.expr], separator: str) -> str | None:
    parts = [_literal_text(node) for node in nodes]
    texts = [part for part in parts if part is not None]
    return separator.join(texts) if len(texts) == len(parts) else None


def _collect_effort_templates(node: ast.AST, templates: set[str]) -> None:
    template = _template_text(node) if isinstance(node, ast.expr) else None
    if template is not None:
        if template.startswith(EFFORT_PREFIX):
            templates.add(template)
        return
    for child in ast.iter_child_nodes(node):
        # Part of a string that cannot be read as a whole must not pass for the message.
        is_fragment = isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.BinOp) and isinstance(child, ast.expr) and _template_text(child) is not None
        )
        if not is_fragment:
            _collect_effort_templates(child, templates)


def _template_text(node: ast.expr) -> str | None:
    """Like `_literal_text`, with a plain name inside an f-string kept as `{name}`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _template_text(node.left), _template_text(node.right)
        return None if left is None or right is None else left + right
    if not isinstance(node, ast.JoinedStr):
        return _literal_text(node)
    parts: list[str] = []
    for piece in node.values:
        match piece:
            case ast.Constant(value=str() as value):
                parts.append(value)
            case ast.FormattedValue(value=ast.Name(id=name), conversion=-1, format_spec=None):
                parts.append("{" + name + "}")
            case _:
                return None
    return "".join(parts)
