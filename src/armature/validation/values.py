"""Check the values of a composed configuration that have a range, a fixed set of choices, or must
not be secret.
"""

import difflib
import logging
import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from armature.config import (
    AtLeast0,
    Config,
    Count,
    Count0,
    Folder,
    Fraction,
    Metric,
    Number,
    Positive,
    Precision,
    Seed,
    Word,
    unresolved,
    walk,
)
from armature.errors import MASK, hide, masked
from armature.parallel.split import SCHEDULES
from armature.validation import foreign_keys, signatures

# what others call it → here
ALIASES = {
    "fp16": "16-mixed",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "fp32": "32-true",
    "32": "32-true",
    "cuda": "gpu",
}
log = logging.getLogger(__name__)
_SECRET = re.compile(
    r"(^|_)(api_?keys?|key|key_?id|token|(api|access|auth|refresh|bearer|hf)_?tokens|auth"
    r"|authorization|passw(or)?d|passphrase|pwd|secrets?|credentials?)$",
    re.IGNORECASE,
)
# names that end in "key" or "token" and are no secrets
_PLAIN_KEY = re.compile(
    r"(^|_)(metric|monitor|input|output|target|batch|sort|state|image|text|label|primary|data|field"
    r"|column|cache|group|config|document|pad|eos|bos|eot|unk|mask|special|cls|sep|start|stop|end"
    r"|begin|sentinel|feature|caption|source|src|tgt|query|video|audio|loss|class|prompt|question"
    r"|answer|context|sample|index|id|name|prefix|suffix|middle)_(key|token)$|^key$",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@", re.IGNORECASE)


# ---------------------------------------------------------------- types of other groups' keys
Share = Annotated[Number, Field(ge=0, le=1)]
# of a model: no model comes near it, and checks may count up to one
Size = Annotated[int, Field(ge=1, le=2**24)]
Path = Annotated[str, Field(pattern=r"^[^\x00]+\Z")]
Paths = Annotated[
    Path | Annotated[list[Path], Field(min_length=1)],
    Field(description="a path, a pattern, or a list of them"),
]
NamedPaths = Annotated[
    dict[str, Paths],
    Field(min_length=1, description="paths for each name, as in {a: a/*.txt, b: b}"),
]
Length = Annotated[
    Count0 | Fraction | Annotated[Number, Field(ge=0, multiple_of=1)],
    Field(description="a whole number of optimizer steps from 0, or a share of the run below 1.0"),
]
Blocks = Annotated[
    list[Count],
    Field(min_length=1, description="numbers of blocks from 1, as in [5,6,5]"),
]
Patterns = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(description="a list of names, as in [q,v]")
]
Weights = Annotated[
    dict[str, Positive],
    Field(min_length=1, description="a number above 0 for each name, as in {a: 3, b: 1}"),
]
PositiveChannels = Annotated[
    list[Positive], Field(min_length=3, max_length=3, description="three numbers above 0")
]
Channels = Annotated[list[Number], Field(min_length=3, max_length=3, description="three numbers")]
BytesAndEnd = Annotated[int, Field(ge=257)]
# of text, of which every split needs some
HeldOut = Annotated[Number, Field(gt=0, lt=0.9, description="a number above 0 and below 0.9")]
Dtype = Literal["bfloat16", "float16", "float32", "float64"]


class OfAnyData:
    fold: Count0 | None
    folds: Annotated[int, Field(ge=2)] | None
    global_batch_size: Count | None
    micro_batch_size: Count | Literal["auto"]
    eval_batch_size: Count | None
    num_workers: Count0
    skip_steps: Annotated[
        list[Count], Field(description="a list of step numbers from 1, as in [7,12]")
    ]
    train_limit: Count | Literal["batch"] | None


class OfTask:
    preview_prompt: Annotated[
        Word | Annotated[list[Word], Field(min_length=1)],
        Field(description="text to continue, a list of texts, or auto for held-out text"),
    ]
    preview_tokens: Count0
    preview_temperature: AtLeast0


class OfAdapter:
    rank: Count
    alpha: Positive
    dropout: Fraction
    targets: Patterns | None
    train: Patterns | None
    quantize: Literal["nf4"] | None


class OfScheduler:
    warmup: Length
    decay: Length
    final: AtLeast0


Axis = Literal["auto"] | Count  # of a mesh: its ranks


class OfStrategy:
    pipe: Axis
    replicate: Axis
    shard: Axis
    context: Axis
    context_method: Literal["auto", "all_to_all", "all_gather"]
    tensor: Axis
    backend: Literal["auto", "gloo", "nccl", "mpi", "ucc", "xccl"]
    compile: Literal["none", "block", "model"]
    compile_mode: Literal[
        "default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"
    ]
    float8: Literal["emulate"] | bool
    expert: Count
    param_dtype: Dtype | None
    reduce_dtype: Dtype | None
    stage: Annotated[int, Field(ge=1, le=3)]
    sequence_parallel: Literal["auto"] | bool
    async_tensor: Literal["auto"] | bool
    schedule: Literal[tuple(SCHEDULES)]  # pyright: ignore[reportInvalidTypeForm]
    seed: Seed
    activation_checkpointing: (
        Literal["none", "every", "half", "selective"] | Count | Annotated[float, Field(gt=0, lt=1)]
    )
    virtual_stages: Annotated[int, Field(ge=2)]
    prefetch: Count0
    min_num_params: Count0
    microbatches: Count
    stages: Blocks | None


class OfData:
    seed: Seed
    shift: Annotated[int, Field(ge=0, le=8)]
    samples: Count
    held_out: Count
    noise: AtLeast0
    context: Count
    val_fraction: Share
    test_fraction: Share
    global_batch_size: Count
    path: Paths | None
    image_mode: Literal["L", "RGB", "RGBA"] | None
    multiple: Count | None


class OfModel:
    vocab_size: Size | None
    context: Size | None
    width: Size
    layers: Annotated[int, Field(ge=1, le=10_000)]
    heads: Size
    kv_heads: Size | None
    head_dim: Size | None
    ffn_hidden: Size | None
    dropout: Fraction
    qk_norm: Literal["weighted"] | bool
    windows: (
        Annotated[
            Count | list[Count | None],
            Field(description="a number of positions from 1, or a list of one for each block"),
        ]
        | None
    )
    document_token: Count0 | None
    experts: Size
    active: Size
    expert_hidden: Size
    shared_hidden: Size | None
    dense_layers: Count0
    score: Literal["sigmoid", "softmax"]
    balance_rate: Fraction
    image_size: Size | None
    patch_size: Size
    channels: Size | None
    classes: Size
    label_smoothing: Fraction
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] | None


class OfSource:
    path: Paths | None
    dtype: Literal["uint16", "uint32", "uint64", "uint8", "int16", "int32", "int64", "int8"]
    context: Count
    vocab_size: Count
    tokenizer_bytes: Count
    val_fraction: Fraction
    test_fraction: Fraction
    too_long: Literal["cut", "drop"]


# names that most optimizers share; torch's would refuse the values in the rank
class OfOptimizer:
    lr: Positive
    weight_decay: AtLeast0
    eps: AtLeast0
    momentum: Fraction
    newton_schulz_steps: Count
    base_width: Count | None
    betas: Annotated[
        list[Fraction],
        Field(
            min_length=2,
            description="two numbers of at least 0 and below 1, as in [0.9,0.95]",
        ),
    ]


class OfImageFolderData:
    size: Count
    margin: AtLeast0
    mean: Channels | None
    std: PositiveChannels | None


class OfSyntheticData:
    image_size: Count | None
    channels: Count | None
    classes: Count | None


class OfCorpus:
    vocab_size: BytesAndEnd
    val_fraction: HeldOut
    test_fraction: HeldOut


class OfBlend:
    vocab_size: BytesAndEnd
    val_fraction: HeldOut
    test_fraction: HeldOut
    paths: NamedPaths
    field: Word
    cache_dir: Folder | None


class OfHFData:
    data_files: Paths | NamedPaths | None


class OfBlendData:
    paths: NamedPaths
    weights: Weights | None


class OfPreference:
    beta: Positive
    loss: Literal["sigmoid", "ipo"]
    label_smoothing: Annotated[Number, Field(ge=0, lt=0.5)]


class OfEMA:
    decay: Annotated[Number, Field(gt=0, lt=1)]


class OfMonitors:
    peak_tflops: Positive | None
    norms_every_n_steps: Count | None


class OfMuon:
    precision: Precision


class OfEarlyStopping:
    mode: Literal["min", "max"]
    monitor: Metric
    patience: Count0
    min_delta: Number


OF_OURS = {  # where the group's class is ours
    "task": OfTask,
    "task.adapter": OfAdapter,
    "scheduler": OfScheduler,
    "strategy": OfStrategy,
    "data": OfData,
    "model": OfModel,
    "data.source": OfSource,
}
OF_CLASSES = {  # which would refuse them in the rank
    "armature.tasks.direct_preference.DirectPreference": OfPreference,
    "armature.data.image_folder.ImageFolderData": OfImageFolderData,
    "armature.data.synthetic.SyntheticData": OfSyntheticData,
    "armature.data.corpus.Corpus": OfCorpus,
    "armature.data.blend.Blend": OfBlend,
    "armature.data.hf.HFData": OfHFData,
    "armature.data.blend.BlendData": OfBlendData,
    "armature.callbacks.ema.EMA": OfEMA,
    "armature.callbacks.monitors.Monitors": OfMonitors,
    "armature.optim.muon.Muon": OfMuon,
    "lightning.pytorch.callbacks.EarlyStopping": OfEarlyStopping,
}
UNSET = object()


def types_of(kind: type, path: str = "") -> dict[str, Any]:
    """Return the type of each key of a class's annotations: of `Annotated[Any, X]` it is X."""
    found: dict[str, Any] = {}
    for name, hint in kind.__annotations__.items():
        more = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        if is_dataclass(hint):
            found |= types_of(hint, f"{name}.")  # pyright: ignore[reportArgumentType]
        else:
            of_x = [each for each in more[:1] if not isinstance(each, FieldInfo)]
            found[f"{path}{name}"] = of_x[0] if of_x else hint
    return found


OF_CORE = types_of(Config)
GROUPS: dict[str, Any] = {each.name: each.type for each in fields(Config)}
OF_OPTIMIZERS = types_of(OfOptimizer, "optimizer.")


Wrong = Iterator[tuple[str, str]]  # keys, and what is said of their values


def wrong(cfg: DictConfig, plain: dict[str, Any]) -> dict[str, str]:
    """Return what is said of each key whose value is wrong; `plain` is the resolved
    configuration.
    """
    found = _all_wrong(plain)
    raw = unresolved(cfg)
    # a reference is right where its key is
    referring = {key: str(select(raw, key))[2:-1] for key in found}
    found = {key: text for key, text in found.items() if referring[key] not in found}
    return found | dict(secrets(raw))


def wrong_of(keys: Collection[str], plain: dict[str, Any]) -> dict[str, str]:
    """Return what is said of those of these typed keys whose values are wrong; references are
    not looked at.
    """
    found = {key: text for key, text in _all_wrong(plain).items() if key in keys}
    return {key: text for key, text in found.items() if "${" not in str(select(plain, key))}


def _all_wrong(plain: dict[str, Any]) -> dict[str, str]:
    return dict(_wrong(schema(plain), plain)) | dict(_endless(plain))


def schema(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the type of each key of which one is known, after the classes that are chosen."""
    found = OF_CORE | types_of(OfAnyData, "data.")
    for path, kind in OF_OURS.items():
        if _is_ours(plain.get(path.partition(".")[0])):
            found |= types_of(kind, f"{path}.")
    for key, hint in OF_OPTIMIZERS.items():
        # an optimizer may mean something by a list, or by null
        is_list = isinstance(select(plain, key), list | dict | None)
        found |= {} if is_list and key != "optimizer.betas" else {key: hint}
    for path, node in walk(plain):
        kind = OF_CLASSES.get(str(node.get("_target_"))) if isinstance(node, dict) else None
        found |= types_of(kind, f"{path}.") if kind is not None else {}
    if select(plain, "optimizer.precision") == select(plain, "trainer.precision"):
        found.pop("optimizer.precision", None)  # reported there
    return found


def unknown(read: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that the core's own groups do not have, where nothing would read them."""
    found = {key: v for key, v in read.items() if key not in {*GROUPS, "defaults", "hydra"}}
    for group, kind in GROUPS.items():
        if is_dataclass(kind) and isinstance(node := read.get(group), dict):
            known = {each.name for each in fields(kind)}
            found |= {f"{group}.{key}": v for key, v in node.items() if key not in known}
    return {str(key): value for key, value in found.items()}


def select(plain: dict[str, Any], key: str) -> Any:
    """Return the value of a key, or UNSET if the configuration has no such key."""
    node: Any = plain
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return UNSET
        node = node[part]
    return node


def _is_ours(node: Any) -> bool:
    return isinstance(node, dict) and str(node.get("_target_")).split(".")[0] in (
        "armature",
        "example",
    )


def _wrong(schema: dict[str, Any], plain: dict[str, Any]) -> Wrong:
    for key, hint in schema.items():
        value = select(plain, key)
        if value is not UNSET and (answer := answer_to(key, hint, value)) is not None:
            yield key, f"{key}={_shown(value)}: {answer}"


def answer_to(key: str, hint: Any, value: Any) -> str | None:
    """Return what a value must be instead, if it is not of a type."""
    if accepts(hint, value):
        return None
    answer = f"must be {words(hint)}."
    if remedy := foreign_keys.remedy(key, str(value)):
        return f"{answer} {remedy}"
    for read in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            if accepts(hint, read(value)):
                return f"{answer} It is text: type {key}={value} without quotes."
    if isinstance(value, str) and accepts(hint, [value]):
        return f"{answer} Type {key}=[{value}]."
    choices = _choices(hint)
    near = difflib.get_close_matches(str(value), choices, 1, 0.4)
    meant = [each for each in (ALIASES.get(str(value)), *near) if each in choices]
    return f"{answer} Did you mean {key}={meant[0]}?" if meant else answer


def _choices(hint: Any) -> list[str]:
    inner = get_args(hint)
    if get_origin(hint) is Literal:
        return [*map(str, inner)]
    return [choice for each in inner for choice in _choices(each)]


_PATTERNS = ConfigDict(regex_engine="python-re")


def accepts(hint: Any, value: Any) -> bool:
    try:
        TypeAdapter(hint, config=_PATTERNS).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_BOUNDS = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}


def words(hint: Any) -> str:
    """Return a type as people say it, such as 'a whole number from 1, or null'."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Annotated:
        notes = [each for each in inner[1:] if isinstance(each, FieldInfo)]
        if described := [each.description for each in notes if each.description]:
            return described[-1]
        bounds = {
            f"{word} {value:g}" if isinstance(value, float) else f"{word} {value}"
            for note in notes
            for bound in note.metadata
            for name, word in _BOUNDS.items()
            if (value := getattr(bound, name, None)) is not None
        }
        above_first = sorted(bounds, key=lambda text: text.startswith(("to", "below")))
        return " ".join([words(inner[0]), *above_first])
    if kind is Literal:
        return f"{'one of ' * (len(inner) > 1)}{', '.join(map(_shown, inner))}"
    if inner and kind is not list and kind is not dict:
        return ", or ".join(dict.fromkeys(map(words, inner)))
    return "a list" if kind is list else _KINDS.get(hint, "null")


def _shown(value: Any) -> str:
    return "null" if value is None else "''" if value == "" else str(value)


def _endless(plain: dict[str, Any]) -> Wrong:
    if all(select(plain, f"trainer.max_{each}") is None for each in ("steps", "epochs")):
        yield (
            "trainer.max_steps",
            "trainer.max_steps=null and trainer.max_epochs=null: the run would never end. Type "
            "trainer.max_steps=… or trainer.max_epochs=….",
        )


# ---------------------------------------------------------------- numbers
def written_out(cfg: DictConfig) -> DictConfig:
    """Write out the numbers that a resolver makes, as in `seed=${oc.env:SEED}`: config.yaml has no
    types, and every value of the environment is a text.

    A text becomes one where its key is meant to hold a number, such as one that takes a number or
    `auto`.
    """
    cfg = cfg.copy()
    for path, value in walk(unresolved(cfg)):
        if isinstance(value, str) and re.fullmatch(r"\$\{[\w.]+:.*\}", value):
            found = OmegaConf.select(cfg, path)
            found = _number(cfg, path, found) if isinstance(found, str) else found
            if isinstance(found, int | float):
                OmegaConf.update(cfg, path, found)
    return cfg


def _number(cfg: DictConfig, path: str, text: str) -> Any:
    """Return the number, or true or false, that a text stands for at a key that is meant to hold
    one: by its type, its argument's annotation or its default.
    """
    try:
        number = OmegaConf.from_dotlist([f"number={text}"]).number
    except yaml.YAMLError:
        return text
    if not isinstance(number, int | float):
        return text
    parent, _, key = path.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else None
    target = str(node.get("_target_")) if isinstance(node, DictConfig) else ""
    hint = schema(OmegaConf.to_container(cfg)).get(path)  # pyright: ignore[reportArgumentType]
    if hint is not None:
        takes = [accepts(hint, each) for each in (number, text)]
    elif signatures.find_definition(target) is not None:
        hint = signatures.signature_at(target).parameters.get(key)
        of_default = isinstance(signatures.defaults_of(target).get(key), int | float)
        takes = [
            signatures.accepts(hint, number),
            not of_default and signatures.accepts(hint, text),
        ]
    else:
        return text
    return number if takes == [True, False] else text


# ---------------------------------------------------------------- secrets
def secrets(raw: dict[str, Any]) -> Wrong:
    """Yield keys whose typed values look secret, because config.yaml would hold them.

    The values are not shown.
    """
    for path, value in walk(raw):
        if not isinstance(value, str) or not value or "${" in value:
            continue
        name = _leaf(path)
        where = f"Put it into .env and refer to it, as in '{path}=${{oc.env:{name.upper()}}}'."
        if is_secret(name):
            yield path, f"{path}: a secret typed here would be written to config.yaml. {where}"
        elif _URL_PASSWORD.search(value):
            what = "a password in an address would be written to config.yaml"
            yield path, f"{path}: {what}. {where}"


def hide_secrets(cfg: DictConfig) -> None:
    """Keep secrets out of messages and logs: those that were typed, and environment variables if
    they, or the keys that refer to them, are secret.
    """
    for path, value in walk(unresolved(cfg)):
        if not isinstance(value, str):
            continue
        secret = is_secret(_leaf(path))
        if secret and "${" not in value:
            hide([value])  # another mistake's message may quote the mapping that holds it
        for name in re.findall(r"\$\{oc\.env:([A-Za-z_]\w*)", value):
            if secret or is_secret(name):
                hide([os.environ.get(name, "")])


def without_secrets(value: Any, *, name: str = "") -> Any:
    """Return hyperparameters in which texts that are secret by their name, and secret variables,
    are masked.
    """
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, dict):
        return {key: without_secrets(each, name=str(key)) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(without_secrets(each, name=name) for each in value)
    if not isinstance(value, str):
        return value
    return MASK if value and is_secret(name) and "${" not in value else masked(value)


def _leaf(path: str) -> str:
    return path.rsplit(".", 1)[-1].split("[")[0]


def is_secret(name: str) -> bool:
    """Return whether a key's name says that its value is secret."""
    return _SECRET.search(name) is not None and _PLAIN_KEY.search(name) is None
