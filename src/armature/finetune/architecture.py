"""config.json of a Hugging Face model and the decoder's arguments, both ways. Torch-free.

transformers 5 writes `rope_parameters`; before, it wrote `rope_theta` and `rope_scaling`. Folders
have either.
"""

from collections.abc import Mapping
from typing import Any

from armature.errors import ConfigError
from armature.finetune.folder import some
from armature.models.decoder.check import windows_of

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
OTHERS = "model=huggingface runs any causal model with transformers' own code"
SIZES = {  # ours → theirs
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn_hidden": "intermediate_size",
    "norm_eps": "rms_norm_eps",
}
# what would change the model's result and the decoder does not have
FIXED = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_bias": False,
    "partial_rotary_factor": 1.0,
}
_ORIGINAL = "original_max_position_embeddings"
ROPE = {  # kind → their name of each of our numbers
    "llama3": {
        "factor": "factor",
        "low_frequency": "low_freq_factor",
        "high_frequency": "high_freq_factor",
        "original_context": _ORIGINAL,
    },
    "yarn": {
        "factor": "factor",
        "original_context": _ORIGINAL,
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    },
    "linear": {"factor": "factor"},
}


def arguments(config: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """Return the decoder's arguments of a config.json, but `context`, `dropout` and what else
    training decides.

    Raises ConfigError with everything that the decoder cannot do; `name` is the folder's.
    """
    kind, found = config.get("model_type"), []
    if kind not in FAMILIES:
        raise ConfigError(
            f"model.pretrained={name}: model_type={kind} is no architecture of the decoder, which "
            "has "
            f"{', '.join(FAMILIES)}. {OTHERS}: type model=huggingface."
        )
    classes = config.get("architectures") or []
    classes = classes if isinstance(classes, list) else [classes]
    if classes and not any(str(each).endswith("ForCausalLM") for each in classes):
        found.append(f"architectures={', '.join(map(str, classes))} is no causal language model")
    if config.get("auto_map"):
        found.append(
            "auto_map: the folder brings code of its own, which is never run. If its weights are "
            "an ordinary "
            f"{kind}'s, remove auto_map"
        )
    if missing := [theirs for theirs in SIZES.values() if config.get(theirs) is None]:
        found.append(f"it lacks {', '.join(missing)}")
    rope, theta = _rope(config, found)
    found += [
        f"{key}={config[key]} is not in the decoder (only {usual})"
        for key, usual in FIXED.items()
        if config.get(key) not in (None, usual)
    ]
    windows = _windows(config) if not missing else None
    if found:
        raise ConfigError(
            [f"model.pretrained={name}: config.json: {problem}." for problem in found]
        )
    return {
        **{ours: config[theirs] for ours, theirs in SIZES.items()},
        "kv_heads": config.get("num_key_value_heads"),
        # transformers' default
        "head_dim": config.get("head_dim", 128 if kind == "qwen3" else None),
        "rope_theta": theta, "rope_scaling": rope, "windows": windows,
        "tied": bool(config.get("tie_word_embeddings", False)), "attention_bias": kind == "qwen2",
        "qk_norm": "weighted" if kind == "qwen3" else False,
    }  # fmt: skip


def _rope(config: Mapping[str, Any], problems: list[str]) -> tuple[dict[str, Any] | None, float]:
    """Return `rope_scaling` and `rope_theta` of either dialect; what is not possible is added to
    `problems`.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}  # as transformers
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "default":
        return None, theta
    if (names := ROPE.get(kind)) is None:
        problems.append(
            f"rope_type={kind} is not in the decoder (only {', '.join(['default', *ROPE])}). "
            f"{OTHERS}"
        )
        return None, theta
    numbers = {ours: rope[theirs] for ours, theirs in names.items() if rope.get(theirs) is not None}
    if "original_context" in names:
        original = _original_context(config, rope)
        numbers["original_context"] = original or config.get("max_position_embeddings")
    known = {*names.values(), "rope_type", "type", "rope_theta", _ORIGINAL}
    usual = {"partial_rotary_factor": 1.0, "truncate": True}
    if unknown := sorted(
        k for k, v in rope.items() if k not in known and v is not None and v != usual.get(k)
    ):
        problems.append(f"rope_type={kind} with {some(unknown)}, which the decoder does not have")
    return {"kind": kind, **numbers}, theta


def _original_context(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Any:
    """Return the context before it was stretched, or None: as in transformers, that beside the rope
    comes first.
    """
    beside = config.get(_ORIGINAL)
    return rope.get(_ORIGINAL) if beside is None else beside


def _windows(config: Mapping[str, Any]) -> list[int | None] | None:
    """Return each block's sliding window, or None if no block has one."""
    layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    if config["model_type"] == "mistral":
        # transformers' default
        window, kinds = (config.get("sliding_window", 4096), ["sliding_attention"] * layers)
    elif config["model_type"] == "llama":
        return None
    else:
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
        first = 28 if config.get("max_window_layers") is None else config["max_window_layers"]
        kinds = kinds or [
            "sliding_attention" if i >= first else "full_attention" for i in range(layers)
        ]
    if window is None or "sliding_attention" not in kinds:
        return None
    return [window if kind == "sliding_attention" else None for kind in kinds]


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Return the most positions that a folder's model is made for, stretched ones included; None:
    it does not say.

    A llama3 rope's factor says how much slower its low frequencies turn, not how much longer the
    context became.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    rope, trained = rope or {}, _original_context(config, rope or {})
    longest = config.get("max_position_embeddings") or 0
    if trained is None or (rope.get("rope_type") or rope.get("type")) == "llama3":
        return longest or None
    return max(longest, int((rope.get("factor") or 1.0) * trained))


def config_of(
    args: Mapping[str, Any], *, dtype: str, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return config.json for a decoder, in the dialect that every version of transformers reads.

    Args:
        args: all of the decoder's arguments.
        dtype: of the weights, as torch names it.
        base: config.json of the folder that the run started from: everything that training does not
            change is its.

    Raises:
        ConfigError: no architecture of Hugging Face's that we write computes what this decoder
            does.
    """
    tied = {"tie_word_embeddings": bool(args["tied"])}
    if base is not None:
        return (
            {k: v for k, v in base.items() if k not in ("dtype", "torch_dtype")}
            | tied
            | {"torch_dtype": dtype}
        )
    windows = windows_of(args["windows"], layers=args["layers"])
    bias, norm, several = args["attention_bias"], args["qk_norm"], len(set(windows)) > 1
    kind = (
        "qwen3"
        if norm
        else "qwen2"
        if bias or several
        else "mistral"
        if windows[0] is not None
        else "llama"
    )
    if norm is True or (norm and bias):
        raise ConfigError(
            f"model.qk_norm={str(norm).lower()} with model.attention_bias={str(bias).lower()}: no "
            "architecture of "
            "Hugging Face's computes this. Only qk_norm=false, or qk_norm=weighted without biases, "
            "can be exported."
        )
    if kind == "qwen2" and not bias:
        raise ConfigError(
            "model.windows that differ between blocks: exported only with attention_bias or "
            "qk_norm."
        )
    head_dim = args["head_dim"] or args["width"] // args["heads"]
    config = {
        "architectures": [f"{kind.title()}ForCausalLM"],
        "model_type": kind,
        "hidden_act": "silu",
        **{theirs: args[ours] for ours, theirs in SIZES.items()},
        **tied,
        "torch_dtype": dtype,
        "num_key_value_heads": args["kv_heads"] or args["heads"],
        "head_dim": head_dim,
        "max_position_embeddings": args["context"],
        "rope_theta": args["rope_theta"],
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if (scaling := args["rope_scaling"]) is not None:
        names = ROPE[scaling.get("kind", "llama3")]
        numbers = {names[ours]: value for ours, value in scaling.items() if ours != "kind"}
        config["rope_scaling"] = {"rope_type": scaling.get("kind", "llama3"), **numbers}
    if len(set(filter(None, windows))) > 1:
        raise ConfigError(
            "model.windows of different widths: no architecture of Hugging Face's has them."
        )
    if any(windows):
        kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
        config |= {
            "sliding_window": max(filter(None, windows)),
            "layer_types": kinds,
            "use_sliding_window": True,
        }
    return config
