"""Whether a value can be what a parameter's annotation says, which is read as a syntax tree and
never evaluated.
"""

from __future__ import annotations

import ast
from typing import Any

PLAIN = {
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str": str,
    "None": type(None),
    "list": list,
    "dict": dict,
}
_PATHS = ("Path", "PathLike", "_PATH", "StrPath")  # a text in a configuration
_LISTS = (
    "list",
    "List",
    "tuple",
    "Tuple",
    "set",
    "Set",
    "Sequence",
    "MutableSequence",
    "Iterable",
    "Collection",
)
_TEXTS_TOO = ("Sequence", "Iterable", "Collection")  # a text is one of its characters
_MAPPINGS = ("dict", "Dict", "Mapping", "MutableMapping")


def accepts(annotation: ast.expr | None, value: Any) -> bool:
    """Return False if the annotation says in plain types, lists, mappings or literals what the
    value is not.
    """
    members = _members(annotation)
    answers = [_is_a(value, each) for each in members]
    return not members or any(answer is not False for answer in answers)


def takes_tensor(annotation: ast.expr | None) -> bool:
    """Return whether an annotation mentions a tensor, also within brackets."""
    nodes = (
        node
        for member in _members(annotation)
        for node in ast.walk(member)
        if isinstance(node, ast.expr)
    )
    return any(_name(node) == "Tensor" for node in nodes)


def words(annotation: ast.expr | None) -> str:
    """Return `Optional[Union[int, str]]` as 'int or str or None'."""
    texts = (
        ", ".join(map(repr, _literals(m))) if _name(m) == "Literal" else ast.unparse(m)
        for m in _members(annotation)
    )
    return " or ".join(dict.fromkeys("str" if text in _PATHS else text for text in texts))


def _members(annotation: ast.expr | None) -> list[ast.expr]:
    """Return the parts of a union."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            return _members(ast.parse(annotation.value, mode="eval").body)
        except SyntaxError:
            return []
    if isinstance(annotation, ast.BinOp):
        return [*_members(annotation.left), *_members(annotation.right)]
    if isinstance(annotation, ast.Subscript):
        name, inner = _name(annotation), _elements(annotation)
        if name == "Annotated":
            return _members(inner[0])
        if name in ("Union", "Optional"):
            none = [ast.Constant(None)] if name == "Optional" else []
            return [*(member for each in inner for member in _members(each)), *none]
    return [annotation] if annotation is not None else []


def _is_a(value: Any, member: ast.expr) -> bool | None:
    """Return None if this cannot be told."""
    name = _name(member)
    if isinstance(value, dict) and "_target_" in value:
        return None  # what it builds is not known
    if isinstance(member, ast.Subscript) and name == "Literal":
        if not all(isinstance(each, ast.Constant) for each in _elements(member)):
            return None
        return any(value == each and type(value) is type(each) for each in _literals(member))
    if name in _PATHS:
        return isinstance(value, str)
    if isinstance(member, ast.Subscript) and name in _LISTS:
        return _is_list(value, member, name)
    if isinstance(member, ast.Subscript) and name in _MAPPINGS:
        of_values = _elements(member)[-1]
        return isinstance(value, dict) and all(accepts(of_values, each) for each in value.values())
    if isinstance(member, ast.Subscript):
        return None
    if name == "Tensor":
        return False
    if isinstance(value, bool) and name in PLAIN:
        return name == "bool"
    kinds = PLAIN.get(name)
    return isinstance(value, kinds) if kinds is not None else None


def _is_list(value: Any, member: ast.Subscript, name: str) -> bool:
    if not isinstance(value, list):
        return name in _TEXTS_TOO and isinstance(value, str)
    inner = _elements(member)
    # people write tuple[int] for a tuple of any length
    if (
        name in ("tuple", "Tuple")
        and len(inner) != 1
        and not any(_name(each) == "..." for each in inner)
    ):
        return len(value) == len(inner) and all(map(accepts, inner, value))
    return all(accepts(inner[0], each) for each in value)


def _elements(node: ast.Subscript) -> list[ast.expr]:
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def _literals(member: ast.expr) -> list[Any]:
    return (
        [e.value for e in _elements(member) if isinstance(e, ast.Constant)]
        if isinstance(member, ast.Subscript)
        else []
    )


def _name(node: ast.expr) -> str:
    """Return the last part of a dotted name, without what is in brackets."""
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    if isinstance(node, ast.Constant):
        return "..." if node.value is ... else str(node.value)
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def is_default(default: ast.expr | None, value: Any) -> bool:
    """Return whether a value is the parameter's default, which annotations may leave out.

    `x: list[int] = None`.
    """
    if not isinstance(default, ast.Constant | ast.List | ast.Tuple | ast.Dict | ast.UnaryOp):
        return False
    made = literal(default)
    made = list(made) if isinstance(made, tuple) else made
    return type(made) is type(value) and made == value


def literal(node: ast.expr | None) -> Any | None:
    """Return the value of a literal, or None of anything else."""
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None
