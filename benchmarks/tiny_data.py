"""The tiny model's data as a data module of ours."""

from armature.data.base import DataModule, Split
from benchmarks.tiny import TinyRows


class TinyData(DataModule):
    """Synthetic rows, the same for every split."""

    def dataset(self, split: Split) -> TinyRows:
        return TinyRows()
