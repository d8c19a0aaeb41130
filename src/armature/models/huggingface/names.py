"""Names of weights in a folder and in the model that transformers builds, both ways, by
transformers' own rules.

Files may lack the base model's prefix, and of some architectures have other names than the newest
code (`embed_out` for `lm_head`). transformers renames them while it loads, and back while it saves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from armature.models.adapters import is_adapter
from armature.models.wrapped import Match

# tables in older folders, which are computed
UNUSED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


def match(model: Any, saved: Iterable[str]) -> Match:
    """Match the names of a folder's tensors with those of a PreTrainedModel."""
    from transformers.conversion_mapping import get_model_conversion_mapping  # pyright: ignore[reportMissingImports]
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key  # pyright: ignore[reportMissingImports]

    own, rules = _own(model), get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix, known = model.base_model_prefix, dict.fromkeys(own, True)
    found, surplus, converted = dict[str, str](), list[str](), list[str]()
    for name in sorted(saved):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in own and name in own:
            renamed, pattern = name, None
        if renamed not in own:
            surplus.append(name)
        elif pattern is not None:
            converted.append(name)
        else:
            found[renamed] = name
    for names in _tied(model):
        if (first := next((name for name in names if name in found), None)) is not None:
            found |= {name: found.get(name, found[first]) for name in names}
    unused = re.compile("|".join([*UNUSED, *(model._keys_to_ignore_on_load_unexpected or ())]))
    return Match(
        found=found,
        missing=sorted(own - found.keys()),
        surplus=[name for name in surplus if not unused.search(name)],
        converted=converted,
    )


def original(model: Any, name: str) -> str:
    """Return the name under which transformers saves a parameter."""
    from transformers.conversion_mapping import get_model_conversion_mapping  # pyright: ignore[reportMissingImports]
    from transformers.core_model_loading import WeightRenaming, rename_source_key  # pyright: ignore[reportMissingImports]

    # else LayerNorm.weight is written as .gamma
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    rules = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    return rename_source_key(
        name, [rule.reverse_transform() for rule in reversed(rules)], [], reverse=True
    )[0]


def _own(model: nn.Module) -> set[str]:
    """Return the names of all parameters and of the buffers that checkpoints hold, adapters
    apart.
    """
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for prefix, module in model.named_modules():
        left_out = module._non_persistent_buffers_set
        names |= {
            f"{prefix}.{name}".lstrip(".") for name in module._buffers if name not in left_out
        }
    return {name for name in names if not is_adapter(name)}


def _tied(model: nn.Module) -> list[list[str]]:
    groups: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        groups.setdefault(param, []).append(name)
    return [names for names in groups.values() if len(names) > 1]
