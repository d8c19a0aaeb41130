"""Check a `_target_` and its arguments against the source code of the class or function, without
importing it.

Importing torch to find a misspelt argument would take seconds. The class is found by walking files
and following `from x import y`, and its constructor and class attributes are read from the syntax
tree.
"""

import ast
import difflib
import functools
import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from armature.data import namesakes
from armature.data.batching import LOADER_KEYS
from armature.errors import ConfigError
from armature.validation import annotations, foreign_keys

LIBRARIES = ("torch", "lightning", *namesakes.TWINS)  # their classes declare nothing of ours
OUR_DATA = "armature.data.base.DataModule"
# groups that a task's constructor gets, if it takes them
FACTORIES = ("model", "optimizer", "scheduler")
Definition = tuple[str, ast.ClassDef | ast.FunctionDef]  # the defining module, and the syntax tree
HYDRA_KEYS = {"_target_", "_partial_", "_args_", "_convert_", "_recursive_"}


@dataclass
class Signature:
    """A constructor's parameters, as syntax trees."""

    parameters: dict[str, ast.expr | None] = field(default_factory=dict)  # annotation of each
    defaults: dict[str, ast.expr] = field(default_factory=dict)  # of each that has one
    required: list[str] = field(default_factory=list)  # without a default, in order
    open: bool = False  # it takes any keyword, or cannot be read from the source


def argument_problems(path: str, node: dict[str, Any], definition: Definition) -> list[str]:
    """Return which arguments of the `_target_` node at `path` its class or function does not
    take.
    """
    target, signature = node["_target_"], signature_of(*definition)
    # data/adapter.py takes its LOADER_KEYS
    plain_data = path == "data" and not derives_from(target, OUR_DATA)
    found = []
    for key, value in node.items():
        if key in HYDRA_KEYS:
            continue
        if key not in signature.parameters:
            if not signature.open and not (plain_data and key in LOADER_KEYS):
                near = difflib.get_close_matches(key, signature.parameters, n=1, cutoff=0.5)
                hint = (
                    f" Did you mean '{near[0]}'?"
                    if near
                    else f" It takes: {', '.join(signature.parameters)}."
                )
                known = [f"{path}.{name}" for name in signature.parameters]
                hint = (
                    f" {remedy}"
                    if (remedy := foreign_keys.remedy(f"{path}.{key}", known=known))
                    else hint
                )
                found.append(f"{path}.{key}: {target} takes no argument '{key}'.{hint}")
            continue
        annotation, default = signature.parameters[key], signature.defaults.get(key)
        if annotations.takes_tensor(annotation) and target.split(".")[0] != "torch":
            continue  # a list, which the class makes a tensor of
        if not annotations.accepts(annotation, value) and not annotations.is_default(
            default, value
        ):
            shown = "null" if value is None else repr(value)
            found.append(
                f"{path}.{key}={shown}: {target} takes {annotations.words(annotation)} here."
            )
    return found


def _module_file(name: str) -> Path | None:
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or []:
        base = Path(folder).joinpath(*rest)
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.exists():
                return candidate
    return None


@functools.cache
def _tree(module: str) -> ast.Module | None:
    file = _module_file(module)
    if file is None:
        return None
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:  # ValueError: a NUL, where Python 3.11 says no more
        line = getattr(error, "lineno", None)
        place = f"{file}:{line}" if line else str(file)
        raise ConfigError(
            f"{module}: {place}: {getattr(error, 'msg', None) or error}. Correct the file."
        ) from error


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that define a module's names, also in its `if` and `try`."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
                yield from _top_level(getattr(node, inner, []))


def targets_in(cfg: Mapping[str, Any], group: str) -> Iterator[tuple[str, str]]:
    """Yield the key and the `_target_` of each callback or logger."""
    for name, node in (cfg.get(group) or {}).items():
        if isinstance(node, Mapping) and "_target_" in node:
            yield f"{group}.{name}", str(node["_target_"])


def is_assigned(target: str) -> bool:
    """Return whether a dotted name is a variable of its module, such as a function that another one
    made.
    """
    module, _, name = target.rpartition(".")
    tree = _tree(module) if module else None
    targets = (
        [each for node in tree.body if isinstance(node, ast.Assign) for each in node.targets]
        if tree
        else []
    )
    return any(isinstance(each, ast.Name) and each.id == name for each in targets)


def is_lazy(target: str) -> bool:
    """Return whether a dotted name lies in a module that makes its names on demand, as transformers
    does.
    """
    tree = _tree(target.rpartition(".")[0])
    return tree is not None and any(
        (isinstance(node, ast.FunctionDef) and node.name == "__getattr__")
        or (isinstance(node, ast.Name) and node.id == "_LazyModule")
        for node in ast.walk(tree)
    )


@functools.cache
def find_definition(target: str, *, depth: int = 0) -> Definition | None:
    """Return the defining module and the syntax tree of a dotted name, through re-exports, or
    None.
    """
    module, _, name = target.rpartition(".")
    tree = _tree(module) if module and depth <= 8 else None
    if tree is None:
        return None
    statements = [*_top_level(tree.body)]
    for node in statements:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return module, node
    for node in statements:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) in (name, "*"):
                    there = f"{_absolute(module, node)}.{name if alias.name == '*' else alias.name}"
                    if (found := find_definition(there, depth=depth + 1)) is not None:
                        return found
    return None


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    file = _module_file(module)
    parts = module.split(".")
    keep = len(parts) - node.level + (1 if file is not None and file.name == "__init__.py" else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def signature_of(module: str, node: ast.ClassDef | ast.FunctionDef) -> Signature:
    if isinstance(node, ast.FunctionDef):
        return _function_signature(node, skip_self=False)
    if (init := _own_constructor(node)) is not None:
        signature = _function_signature(init, skip_self=True)
        kept = _keyword_uses(init, init) or "save_hyperparameters(" in ast.unparse(init)
        if not signature.open or (kept and not _passes_keywords(init)):
            return signature
        signature.parameters |= dict.fromkeys(_taken_keywords(init))
        return _with_bases(module, node, signature)
    if _is_dataclass(node):
        fields = [
            item
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]
        own = Signature(
            {
                item.target.id: item.annotation
                for item in fields
                if isinstance(item.target, ast.Name)
            }
        )
        own.required = [
            i.target.id for i in fields if i.value is None and isinstance(i.target, ast.Name)
        ]
        given = {
            i.target.id: i.value
            for i in fields
            if i.value is not None and isinstance(i.target, ast.Name)
        }
        # field(…)
        own.defaults = {
            name: value for name, value in given.items() if not isinstance(value, ast.Call)
        }
        return _with_bases(module, node, own) if node.bases else own
    base = _base_that_constructs(module, node)
    return Signature(open=bool(node.bases)) if base is None else signature_of(*base)


def default(target: str, name: str) -> Any:
    """Return the default of a constructor's argument, or None if the source has none, or no
    literal.
    """
    definition = find_definition(target)
    found = None if definition is None else signature_of(*definition).defaults.get(name)
    return found.value if isinstance(found, ast.Constant) else None


def _with_bases(module: str, node: ast.ClassDef, own: Signature) -> Signature:
    """Add the parameters of the base whose constructor is called, for `**kwargs` and
    dataclasses.
    """
    if (base := _base_that_constructs(module, node)) is None:
        return Signature(
            own.parameters, own.defaults, own.required, open=bool(node.bases) or own.open
        )
    inherited = signature_of(*base)
    defaults = {**inherited.defaults, **own.defaults}
    return Signature(
        {**inherited.parameters, **own.parameters}, defaults, own.required, open=inherited.open
    )


def _base_that_constructs(module: str, node: ast.ClassDef) -> tuple[str, ast.ClassDef] | None:
    """Return the class whose constructor is called if this one has none.

    None: it has none, or cannot be read.
    """
    above = [*_above(module, node)]
    # as Python's: a base is last
    order = [each for place, each in enumerate(above) if each not in above[place + 1 :]]
    found = next(
        (each for each in order if _is_dataclass(each[1]) or _own_constructor(each[1])), None
    )
    read = all(len([*_bases(*each)]) == len(each[1].bases) for each in [(module, node), *order])
    return order[-1] if found is None and order and read else found


def _above(module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    for base in _bases(module, node):
        yield base
        yield from _above(*base)


def _own_constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    made = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    return made.get("__init__") or made.get("__new__")


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _bases(
    module: str, node: ast.ClassDef, *, libraries: bool = False
) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield the readable bases of a class.

    A library's that is written as `nn.Module` is only read if asked for.
    """
    for base in node.bases:
        name = _base_name(module, base)
        if libraries or "." not in ast.unparse(base) or name.split(".")[0] not in LIBRARIES:
            found = find_definition(name)
            if found is not None and isinstance(found[1], ast.ClassDef) and found[1] is not node:
                yield found[0], found[1]


def _base_name(module: str, base: ast.expr) -> str:
    """Return the dotted name of a base.

    `nn.Module` is `torch.nn.Module`, after the module's own imports.
    """
    written = ast.unparse(base).split("[")[0]
    first, dot, rest = written.partition(".")
    if not dot:
        return f"{module}.{written}"
    tree = _tree(module)
    for node in ast.walk(tree) if tree is not None else ():
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if (alias.asname or alias.name) == first:
                above = f"{_absolute(module, node)}." if isinstance(node, ast.ImportFrom) else ""
                return f"{above}{alias.name}.{rest}"
    return written


def lineage(
    definition: Definition | None, *, libraries: bool = False
) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield a class and its readable bases, each before its own; with `libraries` also torch's and
    Lightning's.
    """
    module, node = definition or ("", None)
    if isinstance(node, ast.ClassDef) and (libraries or module.split(".")[0] not in LIBRARIES):
        yield module, node
        for base in _bases(module, node, libraries=libraries):
            yield from lineage(base, libraries=libraries)


def ancestors(target: str, *, libraries: bool = True) -> list[str]:
    """Return the dotted names, as defined, of the class that `target` names and of its readable
    bases.
    """
    return [
        f"{module}.{node.name}"
        for module, node in lineage(find_definition(target), libraries=libraries)
    ]


def derives_from(target: str, base: str) -> bool:
    """Return whether a class derives from a class `base` of ours, as far as the source code
    says.
    """
    return base in ancestors(target, libraries=False)


def accepted(task: Mapping[str, Any], names: Iterable[str] = FACTORIES) -> list[str]:
    """Return those of `names` that a task's constructor takes and that its own node does not set.

    All that it does not set, if the source of the constructor does not tell. Of those that only
    `**kwargs` would take, those that the class mentions, as in `self.hparams.optimizer` (but
    `{"optimizer": …}` is what Lightning takes); all, if the constructor does something with
    `kwargs`.
    """
    target, names = str(task["_target_"]), [name for name in names if name not in task]
    definition = find_definition(target)
    if definition is None:
        return names
    signature = signature_of(*definition)
    own = [name for name in names if name in signature.parameters]
    if not signature.open:
        return own
    if not derives(definition, ["LightningModule"]):
        return names
    # LightningModule's own constructor takes any keyword, and fails with each
    if not _keeps_keywords(definition):
        return own
    source = "".join(ast.unparse(node) for _, node in lineage(definition))
    whole = re.search(r"\bhparams\b(?!\s*[.\[])", source)  # taken as a whole: anything may read it
    if whole or any(_keyword_uses(init, init) for init in methods_of(definition, ["__init__"])):
        return names
    return [
        name
        for name in names
        if name in own or re.search(rf"hparams\.{name}\b|[\"']{name}[\"'](?!:)", source)
    ]


def unused(task: Mapping[str, Any]) -> list[str]:
    """Return the groups that a task does not take, or sets in its own node."""
    taken = accepted(task)
    return [name for name in FACTORIES if name not in taken]


def _keeps_keywords(definition: Definition) -> bool:
    """Return whether a constructor takes any keyword, and does not pass them on to that of torch's
    or Lightning's.
    """
    for init in methods_of(definition, ["__init__"]):
        if init.args.kwarg is None:
            return False
        if not _passes_keywords(init):
            return True
    return False


def _keyword_uses(node: ast.AST, init: ast.FunctionDef) -> list[ast.Name]:
    """Return where the `**kwargs` of a constructor are named in a part of it."""
    name = init.args.kwarg
    return [
        use
        for use in ast.walk(node)
        if isinstance(use, ast.Name) and name is not None and use.id == name.arg
    ]


def _passes_keywords(init: ast.FunctionDef) -> bool:
    """Return whether a constructor passes its `**kwargs` on to another one."""
    calls = (
        node
        for node in ast.walk(init)
        if isinstance(node, ast.Call) and "__init__" in ast.unparse(node.func)
    )
    return any(_keyword_uses(call, init) for call in calls)


def _taken_keywords(init: ast.FunctionDef) -> list[str]:
    """Return the names that a constructor takes out of its `**kwargs`.

    `kwargs.pop("rate", 0.1)`, `kwargs["rate"]`.
    """
    uses, found = _keyword_uses(init, init), []
    for node in ast.walk(init):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.value in uses
        ):
            found += node.args[:1]
        elif isinstance(node, ast.Subscript) and node.value in uses:
            found.append(node.slice)
    return [
        each.value
        for each in found
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]


def derives(definition: Definition, names: Collection[str]) -> bool | None:
    """Return whether a class is one of `names` or derives from one.

    None if it is a function, or a base is unknown.
    """
    module, node = definition
    if not isinstance(node, ast.ClassDef):
        return None
    if node.name in names:
        return True
    unknown = False
    for base in node.bases:
        written = ast.unparse(base).split("[")[0]
        if written.split(".")[-1] in names:
            return True
        found = find_definition(_base_name(module, base))
        above = derives(found, names) if found is not None and found[1] is not node else None
        if above:
            return True
        unknown |= above is None and written not in ("object", "ABC", "Generic", "Protocol")
    return None if unknown else False


def methods_of(
    definition: Definition | None, names: Collection[str], *, of_ours: bool = True
) -> Iterator[ast.FunctionDef]:
    """Yield the methods of these names of a class and its readable bases, except torch's and
    Lightning's.

    Args:
        of_ours: also those of Armature's own classes.
    """
    for module, node in lineage(definition):
        if of_ours or module.split(".")[0] != "armature":
            yield from (
                item
                for item in node.body
                if isinstance(item, ast.FunctionDef) and item.name in names
            )


def replaced(target: str, names: Collection[str]) -> list[str]:
    """Return those of the methods that a class, or a base of it that is not ours, replaces without
    calling super().
    """
    found = methods_of(find_definition(target), names, of_ours=False)
    return list(dict.fromkeys(item.name for item in found if "super()" not in ast.unparse(item)))


def defaults_of(target: str) -> dict[str, Any]:
    """Return the defaults of the constructor that `target` names, as far as they are literals."""
    definition = find_definition(target)
    defaults = signature_of(*definition).defaults if definition is not None else {}
    values = {name: annotations.literal(node) for name, node in defaults.items()}
    # as in YAML
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }


def class_attribute(target: str, name: str) -> Any | None:
    """Return a class attribute that is a literal, from the class that `target` names or from its
    bases, or None.
    """
    for _, node in lineage(find_definition(target)):
        for item in node.body:
            if isinstance(item, ast.Assign | ast.AnnAssign):
                targets = item.targets if isinstance(item, ast.Assign) else [item.target]
                if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                    return annotations.literal(item.value)
    return None


def assigns(target: str, name: str, value: Any) -> bool:
    """Return whether a method of the class that `target` names, or of its bases, sets `self.<name>`
    to a literal.
    """
    for _, node in lineage(find_definition(target)):
        for item in ast.walk(node):
            if isinstance(item, ast.Assign) and any(
                ast.unparse(each) == f"self.{name}" for each in item.targets
            ):
                return annotations.literal(item.value) == value
    return False


def _function_signature(node: ast.FunctionDef, *, skip_self: bool) -> Signature:
    positional = [*node.args.posonlyargs, *node.args.args]
    arguments = [*positional, *node.args.kwonlyargs][skip_self:]
    # defaults belong to the last parameters
    given = zip(positional[::-1], node.args.defaults[::-1], strict=False)
    keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    defaults = {
        argument.arg: default for argument, default in (*given, *keywords) if default is not None
    }
    required = [argument.arg for argument in arguments if argument.arg not in defaults]
    return Signature(
        {a.arg: a.annotation for a in arguments},
        defaults,
        required,
        open=node.args.kwarg is not None,
    )


def near_definition(target: str) -> str:
    module, _, name = target.rpartition(".")
    tree = _tree(module) if module else None
    if tree is None:
        return f" There is no module '{module}' (looked in src/ and in the installed packages)."
    names = [node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean '{module}.{near[0]}'?" if near else ""


def defines(target: str, method: str) -> bool:
    """Return whether the class that `target` names, or a base of it outside of torch and Lightning,
    has a method.
    """
    return any(methods_of(find_definition(target), [method]))
