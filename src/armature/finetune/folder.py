"""A folder as Hugging Face writes it: config.json, tokenizer, chat template and safetensors.

Torch-free.

Only JSON and the headers of safetensors files are read here. Pickled weights (.bin) and a folder's
own code are never loaded.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from armature.data import tokenizer as tokens
from armature.errors import ConfigError

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"  # of conversations with tools
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"  # older
# what a model folder has besides its weights; a run keeps a copy
SMALL_FILES = (
    CONFIG, TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE, TOOL_TEMPLATE, SPECIAL_TOKENS, ADDED_TOKENS,
    "generation_config.json", "tokenizer.model", "vocab.json", "merges.txt",
)  # fmt: skip
KEPT = "pretrained"  # in a run directory: the small files of the folder that it started from
FINGERPRINT = "fingerprint.txt"  # beside them
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a safetensors file.

    `dtype` is safetensors' name of it, as "BF16"; `span` its bytes in the file.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    span: tuple[int, int] = field(default=(0, 0), compare=False)


@dataclass(frozen=True)
class Weights:
    """The tensors of a folder, by name, and what is wrong with its files."""

    tensors: Mapping[str, SavedTensor]
    problems: tuple[str, ...]

    @property
    def files(self) -> list[str]:
        return sorted({tensor.file for tensor in self.tensors.values()})


def find(name: str) -> Path:
    """Return the folder of this name, or download the model of this name from Hugging Face's hub.

    Raises ConfigError for what is neither, and if the hub cannot be reached.
    """
    folder = Path(name).expanduser()
    if (folder / CONFIG).is_file():
        return folder
    if folder.exists() or not _HUB_NAME.fullmatch(name):
        raise ConfigError(
            f"model.pretrained={name}: no folder that holds a {CONFIG}. Name a folder as "
            "transformers' save_pretrained writes it, or a model of Hugging Face's hub."
        )
    return _download(name)


def _download(name: str) -> Path:
    """Return the local copy of a hub's model, downloaded if it is not there yet; never its .bin
    files or code.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    patterns = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "*.safetensors"]
    try:
        ignored = ["consolidated*", "*/*.json", "*/*.safetensors"]
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=ignored))
    except Exception as error:
        # the hub's client raises its own errors, those of its HTTP library, and OSError
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model.pretrained={name}: no such folder, and Hugging Face's hub did not give a model "
            "of this name "
            f"({type(error).__name__}: {reason[:200]}). Download it where there is a network (hf "
            f"download {name} "
            "--local-dir FOLDER) and type model.pretrained=FOLDER; for a gated model put HF_TOKEN "
            "into .env."
        ) from None


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON file's object. Raises ConfigError, by the file's name."""
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file}: it cannot be read ({error}). Correct it, or download the folder again."
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: must hold a JSON object. Got a {type(value).__name__}.")
    return value


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: it cannot be read ({error}).") from error


def _json_if_there(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def config(folder: Path) -> dict[str, Any]:
    return read_json(folder / CONFIG)


def chat_template(folder: Path) -> str | None:
    """Return the folder's Jinja template of a chat, or None: a file of its own, or in
    tokenizer_config.json (older).

    If the folder has another one for conversations with tools, both are in what is returned.
    """
    plain, tools = (
        _read_text(folder / name) if (folder / name).is_file() else None
        for name in (CHAT_TEMPLATE, TOOL_TEMPLATE)
    )
    if plain is None:
        plain = found = _json_if_there(folder / TOKENIZER_CONFIG).get("chat_template")
        if isinstance(found, list):  # several, with names
            named = {
                each.get("name"): each.get("template") for each in found if isinstance(each, dict)
            }
            plain, tools = named.get("default"), named.get("tool_use", tools)
    if plain is None or tools is None:
        return plain
    # as Jinja2 does; + keeps spaces beside the tag
    plain, tools = (text.removesuffix("\n") for text in (plain, tools))
    return f"{{% if tools is not none +%}}{tools}{{%+ else +%}}{plain}{{%+ endif %}}"


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of bos_token, eos_token, pad_token and unk_token, as far as the tokenizer's
    settings name them.

    A chat template refers to them by these names. As in transformers, special_tokens_map.json comes
    first, unless tokenizer_config.json lists all added tokens.
    """
    settings, older = (_json_if_there(folder / name) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS))
    if "added_tokens_decoder" not in settings:
        settings |= older
    named = {key: settings.get(key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    texts = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in named.items()
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def end_tokens(folder: Path) -> list[int]:
    """Return the ids at which generation stops: of generation_config.json, else of config.json."""
    for name in ("generation_config.json", CONFIG):
        if (found := _json_if_there(folder / name).get("eos_token_id")) is not None:
            ends = found if isinstance(found, list) else [found]
            if not all(isinstance(each, int) for each in ends):
                raise ConfigError(f"{folder / name}: eos_token_id={found}: must be a token's id.")
            return ends
    return []


def tokens_problem(tokenizer_file: Path, known: Mapping[str, int] | None = None) -> str | None:
    """Return a problem if the files beside a tokenizer.json add tokens that it lacks: they would be
    read as characters.

    transformers adds them whenever it loads the folder. `known` are the tokens of tokenizer.json,
    if it was read before.
    """
    folder = tokenizer_file.parent
    settings, older = (_json_if_there(folder / name) for name in (TOKENIZER_CONFIG, ADDED_TOKENS))
    source, added = ADDED_TOKENS, list(older)
    if listed := settings.get("added_tokens_decoder"):
        source, added = TOKENIZER_CONFIG, [each.get("content") for each in listed.values()]
    if not added:
        return None
    there = token_ids(tokenizer_file) if known is None else known
    if not (lacking := [token for token in added if token not in there]):
        return None
    return (
        f"{tokenizer_file} lacks tokens that {source} adds: {some(lacking)}. They would be read as "
        "characters. Write it anew, in Python: "
        f"transformers.AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')."
    )


def token_ids(tokenizer_file: Path) -> dict[str, int]:
    """Return the id of every token of a tokenizer.json."""
    return tokens.read(tokenizer_file).get_vocab(with_added_tokens=True)


def vocabularies_differ(first: Path, second: Path) -> bool:
    """Return whether two tokenizer.json give a token different ids."""
    return first.read_bytes() != second.read_bytes() and token_ids(first) != token_ids(second)


# ---------------------------------------------------------------- weights
def weights(folder: Path) -> Weights:
    """Return the folder's tensors from the headers of its files, and every file that is missing or
    damaged.
    """
    found, problems = dict[str, SavedTensor](), list[str]()
    try:
        names = _weight_files(folder)
    except ConfigError as error:
        return Weights({}, tuple(error.problems))
    for name in names:
        try:
            found |= _header(folder / name)
        except ConfigError as error:
            problems += error.problems
    return Weights(found, tuple(problems))


def _weight_files(folder: Path) -> list[str]:
    if (folder / INDEX).is_file():
        listed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict):
            raise ConfigError(f"{folder / INDEX}: no index of weights. Download it again.")
        return sorted({*map(str, listed.values())})
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    pickled = (path.name for kind in ("*.bin", "*.pth", "*.pt") for path in folder.glob(kind))
    if found := sorted(pickled):
        raise ConfigError(
            f"{folder}: its weights are pickled ({some(found)}), which can run code when they are "
            "loaded, and so they never are. Convert them: transformers' save_pretrained, or timm's "
            "save_for_hf(…, safe_serialization=True), writes safetensors."
        )
    if (folder / "adapter_model.safetensors").is_file():
        raise ConfigError(f"{folder}: an adapter, not a model. Name the folder of its base model.")
    raise ConfigError(f"{folder}: it holds no weights: no {WEIGHTS} and no {INDEX}.")


def _header(file: Path) -> dict[str, SavedTensor]:
    """Return the tensors of one file.

    Raises ConfigError for one that is missing, damaged or not whole.
    """
    try:
        with safe_open(file, framework="np"):
            pass  # it checks the header, and that the tensors fill the file
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header: dict[str, Any] = json.loads(opened.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: missing, truncated, or no safetensors file ({error}). Download it again."
        ) from error
    header.pop("__metadata__", None)
    data = 8 + length
    return {
        name: SavedTensor(
            file.name, each["dtype"], tuple(each["shape"]),
            (data + each["data_offsets"][0], data + each["data_offsets"][1]),
        )
        for name, each in header.items()
    }  # fmt: skip


def some(names: list[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def fingerprint(folder: Path) -> str:
    """Return a hash of config.json and of every tensor's name, type and shape: the same for every
    copy of a model.
    """
    kept = folder / FINGERPRINT
    if kept.is_file():  # a run's copy, which has no weights
        return kept.read_text(encoding="utf-8").strip()
    tensors = sorted(
        (name, each.dtype, each.shape) for name, each in weights(folder).tensors.items()
    )
    digest = hashlib.sha256(json.dumps([config(folder), tensors], sort_keys=True).encode())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------- a run's copy
def keep(folder: Path, run_dir: Path, *, anew: bool = False) -> None:
    """Copy the folder's small files into a run directory, so that the run can be resumed and
    exported without it.

    Args:
        anew: the run has no checkpoint yet: it may have been started from another folder before.
    """
    target = run_dir / KEPT
    if folder.resolve() == target.resolve() or (not anew and (target / FINGERPRINT).is_file()):
        return
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in SMALL_FILES:
        copy(folder / name, target / name)
    # last: the copy is whole
    (target / FINGERPRINT).write_text(fingerprint(folder) + "\n", encoding="utf-8")


def copy(file: Path, target: Path) -> None:
    """Copy one of the small files if it is there."""
    if file.is_file():
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)


def kept_in(run_dir: Path) -> Path | None:
    """Return a run's copy of the folder that it started from, or None."""
    folder = run_dir / KEPT
    return folder if (folder / CONFIG).is_file() else None


def is_same(name: str, run_dir: Path) -> bool:
    """Return whether the folder of this name is the model that a run started from."""
    kept, path = kept_in(run_dir), Path(name).expanduser()
    return kept is not None and (path / CONFIG).is_file() and fingerprint(kept) == fingerprint(path)
