"""Cross-validation: `data.fold=2 data.folds=5` holds out the third of five parts of the samples.

A data module that holds samples out itself takes `fold` and `folds` (`columns.split_indices`). Of
any other one, a fold of its training samples takes the place of its validation samples.
"""

from typing import Any, cast

from torch.utils.data import Subset

from armature.data.columns import split_indices
from armature.data.draw import ReadLoader
from armature.data.stream import Stream
from armature.errors import ConfigError


class Part(Subset[Any]):
    """Some samples of a dataset, with what else it offers, such as `batch` and `augment`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("dataset", "indices"):
            raise AttributeError(name)
        found = getattr(self.dataset, name)
        if name == "batch":
            return lambda indices: found([self.indices[i] for i in indices])
        return (lambda i: found(self.indices[i])) if name == "describe" else found


def part(data: Any, read: ReadLoader, split: str, fold: tuple[int, int]) -> Part:
    """Return the samples of "train" or "val" of a data module's training loader that was read.

    Raises ConfigError if its samples have no numbers.
    """
    name, dataset = type(data).__name__, read.dataset
    number, folds = fold
    why = None
    if getattr(data, "tokens_per_sample", None) is not None:
        why = "texts that are cut into windows"
    elif isinstance(dataset, Stream):
        why = f"a {type(dataset).__name__}"
    elif read.draw is not None:
        why = f"a {type(read.loader).__name__} with a {read.draw.name}"
    if why is not None:
        raise ConfigError(
            f"data.folds={folds}: {name} trains on {why}, of which no fold can be held out. Leave "
            f"data.fold and data.folds out, or let {name} take the arguments fold and folds, and "
            "hold the samples out itself."
        )
    parts = split_indices(len(dataset), val_fraction=0, test_fraction=0, fold=number, folds=folds)
    return Part(cast(Any, dataset), parts[split].tolist())
