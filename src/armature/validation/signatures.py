"""Check the arguments of a `_target_` against the class or function that it names.

The class is imported, and `inspect` says what its constructor takes. Only modules of packages that
this installation or the command allows are imported.
"""

import difflib
import dis
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from armature.data.batching import FOLD_KEYS, LOADER_KEYS
from armature.errors import ConfigError, error_line, place_of
from armature.project import IMPORTED, SOURCES, config_file
from armature.validation import foreign_keys

LIBRARIES = ("torch", "lightning", "builtins", "abc", "typing")  # they declare nothing of ours
OUR_DATA = "armature.data.base.DataModule"
FEED = "armature.data.feed.Feed"  # takes the LOADER_KEYS of any data
# groups that a task's constructor gets, if it takes them
FACTORIES = ("model", "optimizer", "scheduler")
HYDRA_KEYS = {"_target_", "_partial_", "_args_", "_convert_", "_recursive_"}
PACKAGES_KEY = "launch.allowed_packages"
_EMPTY = inspect.Parameter.empty
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_allowed: set[str] = set()
# for armature.load in a notebook of a project; commands and ranks have them already, before others
sys.path += [each for each in IMPORTED if each not in sys.path]


# ---------------------------------------------------------------- packages
def allow(packages: Iterable[str]) -> None:
    """Let modules of these packages be imported, too: those of a configuration that was checked, or
    typed.
    """
    _allowed.update(map(str, packages))


def allowed() -> set[str]:
    """Return the packages that are allowed here."""
    return {*filter(None, _allowed), *installed()}


def installed() -> list[str]:
    """Return the packages that the configuration files of this installation allow, and the user's
    own in src/.
    """
    keys = {"launch": "allowed_packages", "local": PACKAGES_KEY}
    lists = [
        OmegaConf.select(OmegaConf.load(file), key)
        for group, key in keys.items()
        if (file := config_file(group, "default"))
    ]
    return [*dict.fromkeys([*(str(name) for names in lists for name in names or ()), *own()])]


def own() -> list[str]:
    """Return the packages in src/, which may be named in `_target_`."""
    return sorted(file.parent.name for file in SOURCES.glob("*/__init__.py"))


def is_under(name: str, prefixes: Iterable[str]) -> bool:
    return any(not prefix or name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


# ---------------------------------------------------------------- classes
def find_definition(target: str) -> Any | None:
    """Return the class or function of a dotted name, or None.

    ConfigError: its module fails when it is imported.
    """
    module, _, name = target.rpartition(".")
    if not is_under(target, _allowed):
        allow(installed())
    if not module or not is_under(target, _allowed):
        return None
    found = getattr(_imported(module), name, None)
    return found if callable(found) else None


def _imported(module: str) -> ModuleType | None:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{module}.".startswith(f"{missing}."):
            return None
        remedy = (
            f"{error_line(error)}. Correct the import, or install the package {missing} (pip may "
            "have another name)."
        )
        raise ConfigError(f"{module}: {_place(error)}: {remedy}") from error
    except Exception as error:
        raise ConfigError(
            f"{module}: {_place(error)}: {error_line(error).rstrip('.')}. Correct the file, or the "
            "setting that it names."
        ) from error


def _place(error: Exception) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    return place_of(error)


def near_definition(target: str) -> str:
    module, _, name = target.rpartition(".")
    if not module or (found := _imported(module)) is None:
        return f" There is no module '{module}' (looked in src/ and in the installed packages)."
    names = [key for key, value in vars(found).items() if callable(value)]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    return f" Did you mean '{module}.{near[0]}'?" if near else ""


def targets_in(cfg: Mapping[str, Any], group: str) -> Iterator[tuple[str, str]]:
    """Yield the key and the `_target_` of each callback or logger."""
    members = cfg.get(group)
    for name, node in members.items() if isinstance(members, Mapping) else ():
        if isinstance(node, Mapping) and "_target_" in node:
            yield f"{group}.{name}", str(node["_target_"])


def lineage(target: str, *, libraries: bool = False) -> list[type]:
    """Return a class and its bases; with `libraries` also torch's and Lightning's."""
    found = find_definition(target)
    return [
        each
        for each in (found.__mro__ if inspect.isclass(found) else ())
        if libraries or each.__module__.split(".")[0] not in LIBRARIES
    ]


def derives(found: Any, names: Collection[str]) -> bool | None:
    """Return whether a class is one of `names` or derives from one; None if it is a function."""
    return any(e.__name__ in names for e in found.__mro__) if inspect.isclass(found) else None


def derives_from(target: str, base: str) -> bool:
    """Return whether a class is, or derives from, the class of the dotted name `base`."""
    kinds = lineage(target, libraries=True)
    return base in [f"{each.__module__}.{each.__qualname__}" for each in kinds]


def _methods(target: str, *, of_ours: bool = True) -> Iterator[tuple[str, FunctionType]]:
    """Yield the methods of a class and its bases, except torch's and Lightning's."""
    for each in lineage(target):
        if of_ours or each.__module__.split(".")[0] != "armature":
            for name, value in vars(each).items():
                if isinstance(method := inspect.unwrap(value), FunctionType):
                    yield name, method


def defines(target: str, method: str) -> bool:
    """Return whether a class, or a base of it outside of torch and Lightning, has a method."""
    return any(name == method for name, _ in _methods(target))


def replaced(target: str, names: Collection[str]) -> list[str]:
    """Return those of the methods that a class, or a base of it that is not ours, replaces without
    calling super().
    """
    found = [
        name
        for name, method in _methods(target, of_ours=False)
        if name in names and "super" not in method.__code__.co_names
    ]
    return list(dict.fromkeys(found))


def class_attribute(target: str, name: str) -> Any | None:
    """Return a class attribute of the class that `target` names, or None."""
    return next((vars(each)[name] for each in lineage(target) if name in vars(each)), None)


def optimizes_manually(target: str) -> bool:
    """Return whether a method of a class sets `self.automatic_optimization = False`."""
    for _, method in _methods(target):
        steps = list(dis.get_instructions(method))
        for place, step in enumerate(steps):
            if step.opname == "STORE_ATTR" and step.argval == "automatic_optimization":
                return steps[place - 2].argval is False
    return False


# ---------------------------------------------------------------- constructors
@dataclass
class Signature:
    """What a constructor or a function takes."""

    parameters: dict[str, Any] = field(default_factory=dict)  # annotation of each, as a type
    defaults: dict[str, Any] = field(default_factory=dict)  # of each that has one
    required: list[str] = field(default_factory=list)  # without a default, in order
    mentioned: set[str] = field(default_factory=set)  # texts in constructors with **kwargs
    open: bool = False  # it takes any keyword, or cannot be read


def signature_of(found: Any) -> Signature:
    """Return what a class or function takes.

    `**kwargs` of a constructor that calls super() are what the bases take.
    """
    signature, is_class = Signature(), inspect.isclass(found)
    for place, function in enumerate(_constructors(found) if is_class else [found]):
        try:
            parameters = [*inspect.signature(function).parameters.values()][is_class:]
        except (TypeError, ValueError):  # written in C
            signature.open = True
            break
        named = [each for each in parameters if each.kind not in _VARIABLE]
        if place and not named:
            break  # the keywords are not for this base: they are kept
        signature.open = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
        for each in named:
            _add(signature, each, inspect.unwrap(function), first=not place)
        code = getattr(inspect.unwrap(function), "__code__", None)
        if not signature.open or code is None or "super" not in code.co_names:
            break
        texts = {text for text in code.co_consts if isinstance(text, str)}
        signature.mentioned |= texts - {"self"}
    return signature


def _constructors(kind: type) -> Iterator[Callable[..., Any]]:
    for each in kind.__mro__[:-1]:  # without that of object
        if (found := vars(each).get("__init__") or vars(each).get("__new__")) is not None:
            yield found


def _add(signature: Signature, each: inspect.Parameter, function: Any, *, first: bool) -> None:
    """Add a parameter, unless a class before this one has it."""
    if each.name not in signature.parameters:
        signature.parameters[each.name] = _type(each.annotation, function)
    if each.default is not _EMPTY:
        signature.defaults.setdefault(each.name, each.default)
    elif first:
        signature.required.append(each.name)


def _type(annotation: Any, function: Any) -> Any:
    """Return an annotation as a type; Any if it names what cannot be found."""
    if annotation is _EMPTY:
        return Any
    holder = type("Holder", (), {"__annotations__": {"x": annotation}})
    try:
        names = getattr(function, "__globals__", {})
        return get_type_hints(holder, names, {}, include_extras=False)["x"]
    except Exception:  # a name of `if TYPE_CHECKING`, or no type at all
        return Any


def argument_problems(
    path: str, node: dict[str, Any], definition: Any, *, known: Container[str]
) -> list[str]:
    """Return which arguments of the `_target_` node at `path` its class or function does not
    take, except the keys in `known`.
    """
    target, signature = node["_target_"], signature_of(definition)
    if path == "data" and (feed := find_definition(FEED)) is not None:
        of_feed = signature_of(feed).parameters
        of_any = {key: of_feed[key] for key in LOADER_KEYS + FOLD_KEYS}
        signature.parameters |= of_any | signature.parameters  # the class's own come first
    found = []
    for key, value in node.items():
        if key in HYDRA_KEYS or f"{path}.{key}" in known:
            continue
        if key not in signature.parameters:
            if not signature.open and key not in signature.mentioned:
                names = [f"{path}.{name}" for name in signature.parameters]
                hint = foreign_keys.hint(f"{path}.{key}", str(value), names)
                found.append(
                    f"{path}.{key}: {target} takes no argument '{key}' (~{path}.{key} leaves out "
                    f"what a file sets).{hint}"
                )
            continue
        if takes_tensor(signature.parameters[key]) and target.split(".")[0] != "torch":
            continue  # a list, which the class makes a tensor of
        if not accepts(signature.parameters[key], value) and not (
            key in signature.defaults and _as_yaml(signature.defaults[key]) == value
        ):
            shown = "null" if value is None else repr(value)
            hint = inspect.formatannotation(signature.parameters[key]).replace(" | ", " or ")
            found.append(f"{path}.{key}={shown}: {target} takes {hint} here.")
    return found


def takes_tensor(hint: Any) -> bool:
    """Return whether a type mentions a tensor, also within brackets."""
    return getattr(hint, "__name__", "") == "Tensor" or any(map(takes_tensor, get_args(hint)))


def accepts(hint: Any, value: Any) -> bool:
    """Return False if a type says in plain types, lists, mappings or literals what a value of YAML
    is not.
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if isinstance(value, dict) and "_target_" in value:
        return True  # what it builds is not known
    if kind in (Union, UnionType):
        return any(accepts(each, value) for each in inner)
    if kind is Literal:
        return any(value == each and type(value) is type(each) for each in inner)
    if kind in (None, NoneType):
        return value is None
    if not inspect.isclass(kind):
        return True
    if kind in (bool, int, float, str):
        return type(value) is kind or (kind is float and type(value) is int)
    if hasattr(kind, "__fspath__"):
        return isinstance(value, str)
    if issubclass(kind, Mapping):
        of_values = inner[-1] if inner else Any
        return isinstance(value, dict) and all(accepts(of_values, each) for each in value.values())
    if issubclass(kind, Iterable) and kind.__module__ in ("builtins", *_ABSTRACT):
        return _is_list(kind, inner, value)
    return kind.__name__ != "Tensor"


_ABSTRACT = ("collections.abc", "typing")


def _is_list(kind: type, inner: tuple[Any, ...], value: Any) -> bool:
    if not isinstance(value, list):
        return isinstance(value, str) and kind.__module__ in _ABSTRACT
    if kind is tuple and len(inner) > 1 and inner[1] is not ...:
        return len(value) == len(inner) and all(map(accepts, inner, value))
    # people write tuple[int] for a tuple of any length
    return all(accepts(inner[0], each) for each in value if inner)


def _as_yaml(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def signature_at(target: str) -> Signature:
    """Return the signature of what `target` names, empty if there is no such thing."""
    definition = find_definition(target)
    return signature_of(definition) if definition is not None else Signature()


def defaults_of(target: str) -> dict[str, Any]:
    """Return the defaults of what `target` names, as far as YAML can hold them, else None."""
    defaults = signature_at(target).defaults
    plain = (bool, int, float, str, list, tuple, dict)
    return {k: _as_yaml(v) if isinstance(v, plain) else None for k, v in defaults.items()}


def accepted(task: Mapping[str, Any], names: Iterable[str] = FACTORIES) -> list[str]:
    """Return those of `names` that a task's constructor takes and that its own node does not set.

    All that it does not set, if the class cannot be read. A LightningModule that would take them as
    `**kwargs` only gets those that it reads as `self.hparams.NAME`.
    """
    target, names = str(task["_target_"]), [name for name in names if name not in task]
    definition = find_definition(target)
    if definition is None:
        return names
    signature = signature_of(definition)
    # a default such as "adam" is a name of the class's own
    own = [
        name
        for name in names
        if name in signature.parameters and not isinstance(signature.defaults.get(name), str)
    ]
    if not signature.open:
        return own
    if not derives(definition, ["LightningModule"]):
        return names
    read = [method.__code__.co_names for _, method in _methods(target)]
    return [n for n in names if n in own or any("hparams" in r and n in r for r in read)]


def unused(task: Mapping[str, Any]) -> list[str]:
    """Return the groups that a task does not take, or sets in its own node."""
    taken = accepted(task)
    return [name for name in FACTORIES if name not in taken]
