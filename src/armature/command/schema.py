"""JSON Schemas of train.yaml and of each group, with which editors complete and check keys.

They are made from the types in config.py and validation/values.py, and from the constructors of the
classes that the files of configs/ name. `# yaml-language-server: $schema=…` in a file names one.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from omegaconf import OmegaConf
from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError

from armature import project
from armature.config import OF_ONE_CLASS, OPEN, walk
from armature.data.batching import FOLD_KEYS, LOADER_KEYS
from armature.errors import ConfigError
from armature.validation import signatures, usage, values

Schema = dict[str, Any]
Class = tuple[str, Schema, bool]  # its name, the schema of each key, whether it takes others
# what any value may be: a reference, one that is still to be given, or what another class builds
OTHER: Schema = {
    "anyOf": [
        {"type": "string", "pattern": r"\$\{"},
        {"const": "???"},
        {"type": "object", "required": ["_target_"]},
    ]
}


def write() -> None:
    """Write the schemas into configs/.schema/ of the project."""
    folder = project.CONFIGS / ".schema"
    folder.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        text = json.dumps(schema, separators=(",", ":"))
        (folder / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


def schemas() -> dict[str, Schema]:
    """Return the schema of each group, and of the whole configuration as `train`."""
    core: dict[str, Schema] = {}
    for key, hint in values.OF_CORE.items():
        group, _, name = key.rpartition(".")
        core.setdefault(group, {})[name] = _of_type(hint)
    train = core.pop("") | {"hydra": {}, "defaults": _defaults()}
    found = {group: _closed(keys) for group, keys in core.items()}
    found |= {group: _of_group(group) for group in (*OF_ONE_CLASS, *OPEN)}
    train |= {group: {"anyOf": [{"$ref": f"{group}.json"}, {"type": "null"}]} for group in found}
    found["train"] = _closed(train)
    found["hardware"] = _closed({key: {} for content in _files("hardware") for key in content})
    return {name: {"$defs": {"other": OTHER}} | schema for name, schema in found.items()}


def _of_group(group: str) -> Schema:
    """Return the schema of a group, after the classes that its files name."""
    known: dict[str, list[Class]] = {}
    for content in _files(group):
        for path, node in _nodes(content):
            place = path.partition(".")[2] if group in OPEN else path
            known.setdefault(place, []).append(_class(group, path, node, content))
    own = _of_classes(known.pop(""), {*known})
    definitions = {place: _of_classes(classes, set()) for place, classes in known.items()}
    if group in OPEN:
        own = {"type": "object", "additionalProperties": own, "properties": {"defaults": {}}}
    return {"$defs": {"other": OTHER, **definitions}, **own}


def _of_classes(classes: list[Class], places: set[str]) -> Schema:
    """Return the schema of a node: the keys of the class that it names, or of any if it names
    none. A key in `places` holds such a node.
    """
    union: Schema = {}
    rules = {}
    for target, keys, is_open in classes:
        keys = keys | {key: _ref(key) for key in keys.keys() & places}
        named = {"properties": {"_target_": {"const": target}}, "required": ["_target_"]}
        rules[target] = {"if": {"type": "object", **named}, "then": _closed(keys, is_open=is_open)}
        for key, schema in keys.items():
            known = union.setdefault(key, {"anyOf": []})["anyOf"]
            known.extend([schema] if schema not in known else [])
    unnamed = _closed(union, is_open=any(is_open for *_, is_open in classes))
    rules[""] = {"if": {"not": {"required": ["_target_"]}}, "then": unnamed}
    named = {"anyOf": [{"enum": [*rules][:-1]}, {"type": "string"}]}
    kinds = ["object", "null", "string"]
    return {"type": kinds, "properties": {"_target_": named}, "allOf": [*rules.values()]}


def _class(group: str, path: str, node: Schema, content: Schema) -> Class:
    target, definition = str(node["_target_"]), None
    with suppress(ConfigError):  # an extra that is not installed
        definition = signatures.find_definition(target)
    if definition is None:
        return target, {}, True
    signature = signatures.signature_of(definition)
    types = values.schema({group: content})
    prefix = f"{group}.{path}".rstrip(".")
    keys = {
        name: _of_type(types.get(f"{prefix}.{name}", hint), *_default(signature, name))
        for name, hint in signature.parameters.items()
    }
    if prefix == "data":  # of any data module
        more = {name: types.get(f"data.{name}", Any) for name in LOADER_KEYS + FOLD_KEYS}
        keys = {name: _of_type(hint) for name, hint in more.items()} | keys
    mentioned = () if signature.open else signature.mentioned
    more = {*mentioned, *signatures.HYDRA_KEYS} - keys.keys()
    keys |= {name: {} for name in sorted(more)}
    return target, keys, signature.open


def _default(signature: signatures.Signature, name: str) -> set[Any]:
    """Return the values of an argument that its type need not allow: its default, and null, which
    is filled from the data or a folder.
    """
    value = signature.defaults.get(name)
    return {None, value if isinstance(value, str | int | float) else None}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _files(group: str) -> Iterator[Schema]:
    for file in project.options(group).values():
        content: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        yield content.get(group, content)  # of a file with `@package _global_`


def _nodes(content: Schema) -> Iterator[tuple[str, Schema]]:
    for path, node in [("", content), *walk(content)]:
        if isinstance(node, dict) and "_target_" in node:
            yield path, node


def _closed(keys: Schema, *, is_open: bool = False) -> Schema:
    """Return the schema of a mapping with these keys, and a defaults list."""
    properties = {"defaults": {}} | keys
    return {"type": "object", "properties": properties, "additionalProperties": is_open}


def _defaults() -> Schema:
    """Return the schema of a defaults list, which names the options of each group."""
    properties = {}
    for group in usage.GROUPS:
        options = {"anyOf": [{"enum": [*project.options(group)]}, {"type": ["string", "null"]}]}
        several = {"anyOf": [options, {"type": "array", "items": options}]}
        properties |= dict.fromkeys([group, f"override /{group}", f"optional {group}"], several)
    entry = {"properties": properties, "patternProperties": {"hydra/": {}}}
    entry |= {"type": "object", "additionalProperties": False}
    return {"type": "array", "items": {"anyOf": [{"type": "string"}, entry]}}


def _of_type(hint: Any, *default: Any) -> Schema:
    """Return the schema of a value; {} for a type that no text of YAML has."""
    try:
        schema = TypeAdapter(hint, config=values._PATTERNS).json_schema()
    except PydanticUserError:
        return {}
    # JavaScript has \Z and (?i) in no pattern
    text = json.dumps(schema).replace(r"\\Z", "$")
    if not schema or "$ref" in text:
        return {}
    schema = {"type": "string"} if "(?i)" in text else json.loads(text)
    constants = ({"const": each} for each in sorted(default, key=repr))
    return {"anyOf": [schema, *constants, _ref("other")]}
