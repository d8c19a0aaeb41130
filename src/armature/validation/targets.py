"""Check everything that a configuration would call: may it be called, does it exist, does it take
these arguments.

A config.yaml can come from a stranger, and whatever a `_target_` names is imported and called. It
must be a class or a function that builds something, in a package that this installation allows.
What calls others by name, or loads pickles, is refused in every package. The module that *defines*
a class or function decides: a name that some other module merely imported is no way around the
rules. The user's own packages in src/ are trusted.
"""

import importlib.util
import inspect
import sys
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from armature import config
from armature.errors import ConfigError, error_line
from armature.project import SOURCES, config_file, options
from armature.validation import namesakes, signatures
from armature.validation.signatures import PACKAGES_KEY, installed, is_under

# inside these packages, only these parts may be named
CLASSES = {
    "armature": (
        "models",
        "tasks",
        "data",
        "optim",
        "strategies",
        "callbacks",
        "loggers",
        "finetune.lora",
    ),
    "torch": ("nn", "optim", "utils.data"),
    "lightning": tuple(
        f"{side}.{part}"
        for side in ("pytorch", "fabric")
        for part in (
            "accelerators",
            "callbacks",
            "core",
            "demos.boring_classes",
            "demos.transformer",
            "loggers",
            "plugins",
            "profilers",
            "strategies",
        )
    ),
    "torchmetrics": ("",),
}
FUNCTIONS = {
    "armature": ("optim", "strategies.auto"),
    "torch": ("nn.functional", "nn.init", "nn.utils.parametrizations", "optim"),
    "lightning": (),
    "torchmetrics": ("functional",),
}
# refused also if their package is allowed: they call what they are given by name, load pickles, or
# change files
NEVER = (
    "hydra",
    "omegaconf",
    "joblib",
    "cloudpickle",
    "dill",
    "fsspec",
    "numpy.load",
    "numpy.fromfile",
    "numpy.memmap",
    "numpy.save",
    "numpy.savez",
    "numpy.lib",
    "numpy.f2py",
    "numpy.distutils",
    "numpy.testing",
    "pandas.read_pickle",
    "pandas.io.pickle",
    "pandas.eval",
    "setuptools",
    "pip",
    "pkg_resources",
)
CONVERSIONS = ("none", "partial", "object", "all")  # Hydra's _convert_
# of the standard library, harmless classes
PLAIN = ("collections", "datetime", "decimal", "fractions", "pathlib")
ROLES = {  # group → base classes of which one is needed
    "callbacks": ("Callback",),
    "logger": ("Logger",),
    "task": ("LightningModule",),
    "model": ("Module",),
    "data": ("LightningDataModule",),
    "optimizer": ("Optimizer",),
    "scheduler": ("LRScheduler", "_LRScheduler", "ReduceLROnPlateau"),
    "strategy": ("StrategyMixin",),
}
PASSED = {"optimizer": 1, "scheduler": 1}  # positional arguments that a task passes to the factory
PASSED_BY_NAME = {"task": signatures.FACTORIES, "scheduler": ("total_steps",)}


def check(cfg: DictConfig, *, overrides: Sequence[str] = (), packages: Sequence[str] = ()) -> None:
    """Resolve a run's configuration in place, and raise ConfigError if it would call what this
    installation forbids.

    Interpolations are resolved first, so that what was checked is what is called.

    Args:
        overrides: typed by the user of this command; they may allow packages
            (launch.allowed_packages=[…]), which the run's own config.yaml may not.
        packages: allowed by the caller besides.
    """
    config.require_groups(cfg, Path(str(OmegaConf.select(cfg, "run.dir"))) / "config.yaml")
    typed = next(
        (each.partition("=")[2] for each in overrides if config.key_of(each) == PACKAGES_KEY),
        None,
    )
    named = OmegaConf.from_dotlist([f"value={typed}"]).value if typed is not None else []
    try:
        OmegaConf.resolve(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{OmegaConf.select(cfg, 'run.dir')}/config.yaml: {error_line(error)}."
        ) from error
    found = problems(OmegaConf.to_container(cfg), [*installed(), *map(str, named or []), *packages])
    if found:
        raise ConfigError(found)


def problems(cfg: Any, allowed: Sequence[str], *, known: Container[str] = ()) -> list[str]:
    """Return what is wrong with any `_target_` node of a resolved configuration and with its
    arguments.

    Args:
        known: keys whose values are known to be wrong.
    """
    signatures.allow(allowed)
    found = [*_shape_problems(cfg)] if isinstance(cfg, dict) else []
    for path, node, complete in _nodes(cfg):
        try:
            found += _node_problems(path, node, allowed, complete=complete, known=known)
        except ConfigError as error:  # its module cannot be imported
            found += error.problems
    return found


def _nodes(
    node: Any, path: str = "", *, complete: bool = True
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield each mapping that Hydra would call, with its key, in mappings and lists at any depth.

    The third value is False below `_recursive_: false`, where the object above calls it, maybe with
    more arguments.
    """
    if isinstance(node, dict):
        if "_target_" in node:
            yield path, node, complete
        complete = complete and node.get("_recursive_", True) is not False
        for key, value in node.items():
            yield from _nodes(value, f"{path}.{key}" if path else str(key), complete=complete)
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from _nodes(value, f"{path}[{i}]", complete=complete)


def _node_problems(
    path: str,
    node: dict[str, Any],
    allowed: Sequence[str],
    *,
    complete: bool,
    known: Container[str],
) -> list[str]:
    """Return what is wrong with one `_target_` node; those below it are not looked at."""
    target = node["_target_"]
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        return [
            f"{path}._target_={target}: must be the dotted name of a class, as in "
            "'torch.optim.AdamW'."
        ]
    convert, found = node.get("_convert_"), list[str]()
    if convert is not None and str(getattr(convert, "value", convert)).lower() not in CONVERSIONS:
        found.append(f"{path}._convert_={convert!r}: must be one of {', '.join(CONVERSIONS)}.")
    if (refused := _forbidden(path, target, allowed)) is not None:
        return [refused]
    definition = signatures.find_definition(target)
    if definition is None:
        return [
            f"{path}._target_={target}: there is no such class or "
            f"function.{_own(path, target) or signatures.near_definition(target)}"
        ]
    found += signatures.argument_problems(path, node, definition, known=known)
    return found or _role_problems(path, node, definition, complete=complete)


# ---------------------------------------------------------------- what may be called
def _forbidden(path: str, target: str, allowed: Sequence[str]) -> str | None:
    """Return why a target may not be called, or None."""
    what = f"{path}._target_={target}"
    if not is_under(target, allowed):
        package = target.split(".")[0]
        if (twin := namesakes.twin_of(target)) and is_under(twin, allowed):
            return (
                f"{what}: the classes that train here are lightning's. Type {path}._target_={twin}."
            )
        if (SOURCES / package).is_dir():
            return (
                f"{what}: src/{package} is no package. Add an empty file: touch "
                f"src/{package}/__init__.py"
            )
        known = package in sys.modules or importlib.util.find_spec(package) is not None
        if not known or package == SOURCES.name:
            return f"{what}: there is no package '{package}'.{_own(path, target)}"
        return (
            f"{what}: only packages in launch.allowed_packages may be called "
            f"({', '.join(allowed)}). If you trust it: "
            f"'{PACKAGES_KEY}=[{','.join([*dict.fromkeys([*allowed, package])])}]'."
        )
    # by its name first: a refused module is not even imported
    if refused := _refusal(
        what, "os" if "._" in target and target.split(".")[0] in CLASSES else target
    ):
        return refused
    if (found := signatures.find_definition(target)) is None:
        return None
    module = getattr(found, "__module__", None) or target.rpartition(".")[0]
    is_class = inspect.isclass(found)
    if not is_class and not isinstance(found, FunctionType | BuiltinFunctionType):
        module = target.rpartition(".")[0]  # a variable, such as a function that another one made
    home, top = module.split(".")[0], target.split(".")[0]
    written = is_class or isinstance(found, FunctionType)
    defined = f"{module}.{found.__qualname__}" if written else target
    if home != top and not is_under(defined, allowed):
        return (
            f"{what}: it is defined in {module}, which is not in launch.allowed_packages. Name "
            "your own class in src/."
        )
    return _refusal(what, target, is_class=is_class) or _refusal(what, defined, is_class=is_class)


def _own(path: str, target: str) -> str:
    """Return what to type if one class of the project has the name of a target."""
    name = target.rpartition(".")[2]
    found = [
        ".".join([*file.relative_to(SOURCES).with_suffix("").parts, name])
        for file in SOURCES.glob("*/**/*.py")
        if f"\nclass {name}(" in file.read_text(encoding="utf-8", errors="replace")
    ]
    return f" Type {path}._target_={found[0]}." if len(found) == 1 else ""


def _refusal(what: str, name: str, *, is_class: bool | None = None) -> str | None:
    """Return why this name may not be called; `is_class` None: whatever it may be."""
    top, _, rest = name.partition(".")
    kind = "function" if is_class is False else "class"
    remedy = (
        f"Name a class that builds one thing; what else you need belongs into a {kind} of "
        "your own package in src/."
    )
    if is_under(name, NEVER) or (top in sys.stdlib_module_names and top not in PLAIN):
        return (
            f"{what}: it can run other code or change files, so a configuration may not name "
            f"it. {remedy}"
        )
    if top not in CLASSES:
        return None
    places = (
        *(CLASSES[top] if is_class is not False else ()),
        *(FUNCTIONS[top] if not is_class else ()),
    )
    # re-exported, as armature.X
    package_root = is_class is not False and rest.count(".") <= (1 if top == "lightning" else 0)
    if not (is_under(rest, places) or package_root):
        return f"{what}: a configuration may not name this {kind} of {top}. {remedy}"
    return None


# ---------------------------------------------------------------- what each group needs
def _shape_problems(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield groups that hold no `_target_` where one is needed."""
    for group in config.OPEN:
        members = cfg.get(group) or {}
        if not isinstance(members, dict):
            yield f"{group}={members!r}: must be a mapping of names. Type {group}=null for none."
            continue
        for name, node in members.items():
            if not isinstance(node, dict) or "_target_" not in node:
                option = config_file(group, str(name))
                listed = (
                    f"{group}={name} (in an experiment: override /{group}: [{name}]), or "
                    if option
                    else ""
                )
                remedy = f"Remove it, or type {listed}+{group}.NAME._target_=package.Class"
                yield f"{group}.{name}={node!r}: is no NAME: {{_target_: package.Class}}. {remedy}."
    for group in config.OF_ONE_CLASS:
        node = cfg.get(group, {"_target_": None})
        if not (isinstance(node, dict) and "_target_" in node) and (node or group != "scheduler"):
            yield (
                f"{group}._target_ is missing. Write _target_: PACKAGE.MODULE.CLASS into its file, "
                f"or type {group}=NAME, one of {', '.join(options(group))}."
            )


def _role_problems(
    path: str, node: dict[str, Any], definition: Any, *, complete: bool
) -> list[str]:
    """Return whether a group's own class is of the wrong kind, or lacks arguments that nobody else
    passes.
    """
    group, _, rest = path.partition(".")
    if group not in ROLES or "." in rest or "[" in rest or bool(rest) != (group in config.OPEN):
        if node.get("_partial_") or not complete:
            return []
        return _missing(path, node, definition, passed=0, by_name=())
    target, kinds = node["_target_"], ROLES[group]
    if signatures.derives(definition, kinds) is False:
        advice = "Name a class that derives from one."
        if group == "strategy":
            advice = "Type strategy=ddp, strategy=fsdp, or another one of configs/strategy/."
        return [f"{path}._target_={target}: is no {kinds[0]}, which {group} needs. {advice}"]
    partial = node.get("_partial_")
    if group in PASSED and not partial:
        return [
            f"{path}._partial_=false: the task calls it with its parameters. Write _partial_: "
            f"true into its file, or type ++{path}._partial_=true."
        ]
    if partial and group not in PASSED and group != "model":
        return [
            f"{path}._partial_=true: the run builds it at once. Remove the line, or type "
            f"{path}._partial_=false."
        ]
    by_name = PASSED_BY_NAME.get(group, ())
    return _missing(path, node, definition, passed=PASSED.get(group, 0), by_name=by_name)


def _missing(
    path: str, node: dict[str, Any], definition: Any, *, passed: int, by_name: Sequence[str]
) -> list[str]:
    if node.get("_args_"):
        return []
    required = [
        name
        for name in signatures.signature_of(definition).required[passed:]
        if name not in by_name
    ]
    lacking = [name for name in required if name not in node]
    return [
        f"{path}.{name}: {node['_target_']} needs it. Type +{path}.{name}=…" for name in lacking
    ]
