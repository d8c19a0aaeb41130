"""Hydra 1.3 and 1.4, which want the same said in other words. Torch-free."""

from contextlib import AbstractContextManager
from typing import Any

import hydra
from omegaconf import OmegaConf

from armature.project import CONFIGS
from armature.validation import namesakes

namesakes.install()  # before any class of users is found
_IS_OLD = hydra.__version__ < "1.4"
_BASE: Any = {"version_base": "1.3"} if _IS_OLD else {}
register_resolver: Any = getattr(OmegaConf, f"register_{'new_' * _IS_OLD}resolver")
# of `hydra.main`. The rest of what Hydra may call is for `instantiate` to say
MAIN: Any = {
    **(_BASE if _IS_OLD else {"execution_whitelist": "armature.*"}),
    "config_path": str(CONFIGS),
    "config_name": "train",
}


def composing() -> AbstractContextManager[None]:
    """Return the context in which `hydra.compose` reads the files of configs/."""
    return hydra.initialize_config_dir(config_dir=str(CONFIGS), **_BASE)


def instantiate(node: Any, *args: Any, **kwargs: Any) -> Any:
    """Build what a node names, of the packages that `launch.allowed_packages` allows."""
    from hydra import utils
    from hydra.errors import InstantiationException

    from armature.validation import signatures

    if not _IS_OLD:
        kwargs["_execution_whitelist_"] = [
            pattern for name in signatures.allowed() for pattern in (name, f"{name}.*")
        ]
    try:
        return utils.instantiate(node, *args, **kwargs)
    except Exception as error:  # 1.4 raises the class's own, with a note of the key
        if not (notes := getattr(error, "__notes__", [])):
            raise
        raise InstantiationException("\n".join([repr(error), *notes])) from error
