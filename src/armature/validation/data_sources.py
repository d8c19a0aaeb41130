"""Refuse data that are not there, before processes start."""

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from armature.data import sources
from armature.errors import ConfigError, error_line
from armature.validation.composing import instantiate

# by `_target_`: what looks for data.path without torch, in data modules that have no source
_FIND = {
    "armature.data.table.TableData": sources.find,
    "armature.data.labeled_text.LabeledTextData": sources.find,
    "armature.data.image_folder.ImageFolderData": sources.check_class_folders,
}


def problems(cfg: DictConfig, *, prepare: bool) -> list[str]:
    """Prepare the data source once, so that the ranks only open it; if the run is refused anyway,
    check it quickly.
    """
    has_source = isinstance(OmegaConf.select(cfg, "data.source"), DictConfig)
    find = None if has_source else _FIND.get(OmegaConf.select(cfg, "data._target_"))
    if not has_source and find is None:
        return []
    if "path" in cfg.data and not cfg.data.path:
        other = " For the standard library's source type data=stdlib." if has_source else ""
        return [f"data.path=null: name a file, a folder or a pattern.{other}"]
    try:
        if find is not None:
            find(cfg.data.path)
        else:
            _open(cfg.data.source, prepare=prepare)
    except ConfigError as error:
        return error.problems
    except (HydraException, OSError, RecursionError, TypeError, ValueError) as error:
        # a folder that may not be read
        key = "data.path" if find is not None else "data.source"
        rest = "" if find is not None else " and the other keys of data.source"
        return [f"{key}: {error_line(error.__cause__ or error)}. Check data.path{rest}."]
    return []


def _open(node: DictConfig, *, prepare: bool) -> None:
    source = instantiate(node, _convert_="all")
    if prepare:
        source.prepare()
    elif hasattr(source, "check"):
        source.check()
