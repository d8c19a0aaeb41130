"""Turns what Hydra says of a command line into all its mistakes at once, each with the nearest
thing that would work.

Hydra stops at the first mistake. On this path alone, the overrides are tried one by one.
"""

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from armature import config
from armature.errors import ConfigError
from armature.project import FOLDERS, config_file, options
from armature.sweeps import space
from armature.validation import foreign_keys, signatures, usage, values
from armature.validation.composing import composing

# of CPU time for trying all but the first: a machine that stands still must not skip any
MOST_SECONDS = 4.0
# groups whose files set values of the whole configuration
GLOBAL = ("experiment", "debug", "sweep")
HEADER = "# @package _global_"
SEARCHPATH = "hydra.searchpath="  # adds folders, as --config-dir does
_PLANNED = (  # of hardware=, whose folder is in configs/
    "it is for scripts/plan.py and scripts/simulate.py; a run takes the devices of its machine. "
    "Leave it out, or type trainer.devices=N, with trainer.accelerator=gpu or cpu."
)
_searched: list[str] = []  # such an override, in all that is composed here
CONFIG_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)


def composed(overrides: list[str]) -> DictConfig:
    """Return the configuration that train.py would compose, unchecked.

    ConfigError: all that does not compose.
    """
    try:
        with composing():
            return compose("train", overrides)
    except (*CONFIG_ERRORS, TypeError, ValueError) as error:
        # the last two for a group's option that is no word
        raise ConfigError(explain(error, overrides)) from error


def explain(error: Exception, overrides: list[str], *, sweep: bool = False) -> list[str]:
    """All problems of the overrides; of the configuration files, where the overrides are sound.

    The options of groups are composed once, and each other override is applied to the result.
    """
    with _hydra(overrides):
        return _explain(error, overrides, sweep=sweep)


def _explain(error: Exception, overrides: Sequence[str], *, sweep: bool = False) -> list[str]:
    sound, keys, failed, problems = [], [], [], []
    for each in overrides:
        if each in _searched:
            continue
        parsed = parse_override(each)
        if parsed is None:
            problems.append(of_no_form(each))
        elif parsed.is_sweep_override():
            # values of a sweep do not compose as they stand, and are no mistake
            problems += [] if sweep else [_several(each)]
        elif (group := _options(parsed.key_or_group)) and None in _files(parsed).values():
            failed.append((each, MissingConfigException("")))
        elif group or "/" in parsed.key_or_group:
            sound.append(each)
        else:
            keys.append((each, parsed))
    if isinstance(_composed((*sound,)), Exception):  # one by one takes a second
        if isinstance(problem := _composed(()), Exception):
            return [f"The configuration files do not compose: {plain_text(problem)}"]
        chosen, sound = sound, []
        for each in chosen:
            if isinstance(problem := _composed((*sound, each)), Exception):
                failed.append((each, problem))
            else:
                sound.append(each)
    cfg: Any = copy.deepcopy(_composed((*sound,)))  # which is kept
    for each, parsed in keys:
        if (problem := apply(cfg, parsed)) is not None:
            failed.append((each, problem))
    problems += [_describe(problem, each, cfg) for each, problem in failed]
    problems += _of_values(cfg, overrides, [each for each, _ in failed]) if problems else []
    return problems or [plain_text(error)]


def _of_values(cfg: DictConfig, overrides: Sequence[str], failed: list[str]) -> list[str]:
    """Return what is wrong with the values of the other overrides."""
    from armature.validation import checks  # which most mistakes of this kind do not need

    chosen = {*map(config.key_of, failed)}
    sound = [each for each in overrides if each not in failed and parse_override(each) is not None]
    # an experiment that is not found may choose any class
    uncertain = {*chosen, *(checks.CLASSES if chosen & {*GLOBAL} else ())}
    return checks.typed_problems(cfg, sound, uncertain=uncertain)


def parse_override(override: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException:
        return None


def of_no_form(override: str) -> str:
    return (
        f"{override}: this is not of the form key=value, without spaces (quote values that hold "
        "spaces or commas: 'key=\"a b\"')."
    )


def _several(override: str) -> str:
    return (
        f"{override}: several values is a sweep, a run for each. Type -m before it, or one value, "
        f"as in {override.split(',')[0]}. A list has brackets, as in logger=[csv,tensorboard], and "
        "a text with commas two pairs of quotes: 'key=\"a, b\"'."
    )


def _files(parsed: Override) -> dict[str, Path | None]:
    """Return the file of each option that is chosen of a group, or None if it has none."""
    chosen, typed = parsed.value(), str(parsed.input_line).partition("=")[2].strip("'\"")
    if chosen is None or parsed.is_delete():
        return {}
    names = map(str, chosen) if isinstance(chosen, list) else [typed]
    return {name: config_file(parsed.key_or_group, name, _folders()) for name in names}


def apply(cfg: DictConfig, override: Override, *, adds: bool = False) -> Exception | None:
    """Apply an override to a composed configuration as Hydra does, or return why it cannot be.

    Args:
        adds: its key need not be there.
    """
    key, value = override.key_or_group, override.value()
    there = OmegaConf.select(cfg, key, throw_on_missing=False)
    adds = adds or override.is_add()
    if (override.is_delete() and there is None) or (
        override.is_add() and there is not None and not isinstance(value, dict | list)
    ):
        return ValueError("Hydra removes no key that is null. Write a file without it in configs/")
    try:
        if override.is_delete():
            parent, _, last = key.rpartition(".")
            with open_dict(cfg):
                del (OmegaConf.select(cfg, parent) if parent else cfg)[last]
        else:
            OmegaConf.update(cfg, key, value, force_add=adds or override.is_force_add())
    except Exception as error:
        return error
    return None


def explain_sweep(overrides: list[str], check: Callable[..., object]) -> list[str]:
    """What is wrong with any value of a sweep, before its first trial: each is tried beside the
    others' first values, then beside their last. One that fits either is left to its trials.

    What more than 4 s of CPU time would be needed for is left to its trial.

    Args:
        check: raises ConfigError for a configuration and its `overrides` that a run would refuse
            here; trials that another launcher sends elsewhere are only composed.
    """
    with _hydra(overrides):
        try:
            fixed, values, here = _sweep(overrides)
        except ConfigError as error:
            return error.problems
        except CONFIG_ERRORS:
            return []  # Hydra meets it, too
        found, end = [], None
        trials = [
            [
                [*fixed, *(each[at] for j, each in enumerate(values) if j != i), value]
                for at in (0, -1)
            ]
            for i, of_one in enumerate(values)
            for value in of_one
        ]
        for trial in trials or [[fixed]]:
            if end is not None and time.process_time() > end:
                break
            problems = []
            for typed in trial:
                made = _composed((*typed,), hydra=False)
                try:
                    if isinstance(made, Exception):
                        raise ConfigError(_explain(made, typed))
                    if here:
                        check(made, overrides=typed)
                    folder = Path(made.run.root, made.run.name or "")
                    if config.is_of_a_run(folder / "config.yaml"):
                        raise ConfigError(
                            f"{folder} holds a run, not a sweep. Type another run.name."
                        )
                    break
                except ConfigError as error:
                    problems = error.problems
            else:
                found += problems
            # the first one's time is that of the imports
            end = end or time.process_time() + MOST_SECONDS
    # Hydra's own values are not there yet, which it says in this text alone
    return [problem for problem in dict.fromkeys(found) if "HydraConfig was not set" not in problem]


def _hydra(overrides: Sequence[str] = ()) -> AbstractContextManager[None]:
    _composed.cache_clear()
    _searched[:] = [each for each in overrides if each.startswith(SEARCHPATH)]
    GlobalHydra.instance().clear()
    return composing()


def _sweep(overrides: list[str]) -> tuple[list[str], list[list[str]], bool]:
    """The overrides that stay, the values of each that does not, and whether trials run on this
    machine.
    """
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    _, fixed = space.split({}, overrides, parser)
    hydra = compose("train", overrides=fixed, return_hydra_config=True).hydra
    params = hydra.sweeper.params or {}
    if str(hydra.sweeper._target_).startswith("hydra_plugins.armature_"):
        of_hydra = [each for each in fixed if each.lstrip("+~").startswith(("hydra.", "hydra/"))]
        parameters, stays = space.read(params, [e for e in overrides if e not in of_hydra])
        return [*stays, *of_hydra], [each.extremes() for each in parameters], True
    if not str(hydra.sweeper._target_).endswith("BasicSweeper"):
        return fixed, [], False  # which values there are is the sweeper's secret
    swept, stays = space.split(params, overrides, parser)
    values = space.grid(swept)
    if (size := hydra.sweeper.max_batch_size) is not None and size < 1:
        raise ConfigError(
            f"hydra.sweeper.max_batch_size={size}: type a number of trials of at least 1, or null "
            "for all."
        )
    here = str(hydra.launcher._target_).endswith((".BasicLauncher", ".TrialLauncher"))
    return stays, values, here


@cache
def _composed(overrides: tuple[str, ...], *, hydra: bool = True) -> DictConfig | Exception:
    """Return the configuration, with the group of Hydra itself, or why it does not compose."""
    try:
        return compose("train", [*_searched, *overrides], return_hydra_config=hydra)
    except Exception as error:  # for a group that is no word, Hydra raises ValueError and TypeError
        return error


def _of_option(group: str, option: str) -> list[str]:
    """Return the keys of a group's option, with those that its file takes from another in its
    defaults list.
    """
    try:
        with warnings.catch_warnings():  # of the defaults list of a file that is not a primary one
            warnings.simplefilter("ignore")
            # in a tenth of the time
            return _keys(compose(f"{group}/{option}", overrides=_searched))
    except Exception:  # a file that changes other groups composes with them only
        made = _composed((f"{group}={option}",))
        return [] if isinstance(made, Exception) else _keys(made)


def searching(folder: str | Path) -> str:
    """Return the override that also looks for configurations in a folder."""
    path = str(Path(folder).resolve()).replace("'", "\\'")
    return f"{SEARCHPATH}['file://{path}']"


def _folders() -> list[Path]:
    parsed: Any = OverridesParser.create().parse_overrides([*_searched])
    places = [str(place) for override in parsed for place in override.value()]
    return [
        *FOLDERS,
        *(Path(place.removeprefix("file://")) for place in places if place.startswith("file://")),
    ]


def _options(group: str) -> dict[str, Path]:
    return options(group, _folders()) if group else {}


def _describe(error: Exception, override: str, cfg: DictConfig) -> str:
    """Return what is wrong with an override, and what to type instead."""
    parsed: Any = parse_override(override)
    key, value = parsed.key_or_group, override.partition("=")[2]
    files = _options(key)
    known = [*_keys(cfg), *usage.GROUPS]
    if override.startswith("+") and key in known:
        without = override.lstrip("+")
        plain = parse_override(without)
        wrong = apply(cfg, plain) if plain is not None and not files else None
        return (
            _describe(wrong, without, cfg)
            if wrong is not None
            else f"{override}: '{key}' exists already. Leave out the plus: type {without}."
        )
    holder, _, last = key.rpartition(".")
    node = OmegaConf.select(cfg, holder) if holder else None
    target = str(node["_target_"]) if isinstance(node, DictConfig) and "_target_" in node else ""
    signature = signatures.Signature()
    # files of ours name what their classes take, of which most would import torch
    with suppress(ConfigError):  # a module that cannot be imported
        signature = signature if target.startswith("armature.") else signatures.signature_at(target)
    takes = signature.parameters
    if key not in known and last in takes:
        return f"{override}: there is no key '{key}', but {target} takes it. Type +{override}."
    known += [f"{holder}.{each}" for each in takes]
    remedy = foreign_keys.remedy(key, value)
    # the template's module
    if key.startswith("model.") and (of_task := f"task.{key.removeprefix('model.')}") in known:
        remedy = f"Type {of_task}={value}."
    group, _, name = key.partition(".")
    if group == "hardware":
        return f"{override}: {_PLANNED}"
    if files:
        chosen = _files(parsed)
        lacking = [each for each, file in chosen.items() if file is None]
        if not lacking:
            *_, file = [None, *chosen.values()]
            return f"{override}: {_inside(error, file, known) if file else plain_text(error)}"
        hint = f" {remedy}" if remedy else foreign_keys.nearest(lacking[0], files)
        named = ", ".join(f"'{each}'" for each in lacking)
        return f"{override}: {key} has no option {named}.{hint} Options: {', '.join(files)}."
    if isinstance(error, MissingConfigException):  # Hydra's own
        return f"{override}: {remedy or plain_text(error)}"
    if isinstance(error.__cause__, ValidationError) or isinstance(error, ValidationError):
        hint = values.OF_CORE.get(key)
        answer = values.answer_to(key, hint, parsed.value()) if hint is not None else None
        if answer is not None:
            return f"{override}: {answer}"
        said = str(error.__cause__ or error).splitlines()[0].rstrip(".")
        return f"{override}: {said}.{f' {remedy}' if remedy else ''}"
    if remedy:
        return f"{override}: there is no key '{key}'. {remedy}"
    if key in known:
        is_list = OmegaConf.is_list(OmegaConf.select(cfg, key))
        remedy = f"it is a list. Type {key}=[a,b]" if is_list else plain_text(error)
        return f"{override}: {key} takes no such value: {remedy}."
    texts = _candidates(group, last) if name else {}
    having = [option for option in texts if key in _of_option(group, option)]
    adds = group in config.OPEN or signature.open or last in signature.parameters
    adds = adds or (target and any(target in texts[each] for each in having))
    add = f" To add it, type +{override}." if adds and name and override[:1] not in "+~" else ""
    if having:
        there = f"here: it belongs to {group}={f', {group}='.join(having)}"
        return f"{override}: there is no key '{key}' {there}.{add}"
    return f"{override}: there is no key '{key}'.{foreign_keys.nearest(key, known)}{add}"


def _candidates(group: str, word: str) -> dict[str, str]:
    """Return the options of a group whose file has this word, or takes keys from another, with
    their texts.
    """
    return {
        option: text
        for option, file in _options(group).items()
        for text in [file.read_text(encoding="utf-8", errors="replace")]
        if word in text or "defaults:" in text
    }


def _inside(error: Exception, file: Path, known: list[str]) -> str:
    where = f"in {file.parent.parent.name}/{file.parent.name}/{file.name}"
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
        return f"{where}: line {mark.line + 1}: {error.problem}."
    if isinstance(error, UnicodeDecodeError):
        return f"{where}: it is not UTF-8 text (byte {error.start:,}). Save it as UTF-8."
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    first = next(filter(None, map(str.strip, lines)), "")
    if file.parent.name in GLOBAL and first != HEADER:
        return f"{where}: its first line must be '{HEADER}', and is {first!r}."
    if isinstance(error, MissingConfigException):
        missing = str(error.missing_cfg_file)
        group, _, option = missing.rpartition("/")
        hint = foreign_keys.hint(group, option, error.options or (), word=option)
        if inner := group.partition("/")[2]:  # of a file that is no option of that group
            hint = f" Write '- override /{inner}: {option}'."
        return f"{where}: there is no '{missing}'.{hint}"
    read: Any = None
    with suppress(OSError, ValueError, yaml.YAMLError, OmegaConfBaseException):
        read = config.unresolved(OmegaConf.load(file))
    read = read if file.parent.name in GLOBAL else {file.parent.name: read}
    read = read if isinstance(read, dict) else {}
    cause = error.__cause__ or error.__context__
    unknown = values.unknown(read)
    if not unknown and isinstance(cause, ConfigKeyError):
        unknown = {str(cause.full_key): "…"}  # of a file that this one names
    found = [
        f"{key}: it is {read[key]}, where keys belong. Write KEY: VALUE below {key}:, or "
        f"'- override /{key}: NAME' in its defaults list."
        for key, kind in values.GROUPS.items()
        if (kind is config.Keys or is_dataclass(kind))
        and not isinstance(read.get(key), dict | None)
    ]
    found += values.wrong_of(values.OF_CORE, read).values()
    for key, value in unknown.items():
        if "." in key and key in read:
            holder, _, last = key.rpartition(".")
            found.append(f"{key}: a file has no dotted keys. Write {last}: below {holder}:.")
        else:
            found.append(f"there is no key '{key}'.{foreign_keys.hint(key, str(value), known)}")
    if found:
        return f"{where}: {' And '.join(found)}"
    form = (  # Hydra cannot make sense of the defaults list
        " Write '- override /GROUP: NAME' for a group of configs/, as in "
        "'- override /model: example'."
    )
    said = plain_text(error).rstrip(".")
    return f"{where}: {said}.{'' if isinstance(cause, OmegaConfBaseException) else form}"


def _keys(cfg: DictConfig) -> list[str]:
    return [key for key, _ in config.walk(config.unresolved(cfg))]


def plain_text(error: Exception) -> str:
    lines = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines[:4]))
