"""The layout of a run, as strategies report it: which rank holds which part of the model, the batch
and the draws.
"""

from typing import TYPE_CHECKING

import lightning as L

if TYPE_CHECKING:
    # a mixin is combined with one of Lightning's
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class LayoutMixin(_Base):
    """The properties that gradients, checkpoints and data depend on; a strategy with a mesh
    overrides them.

    Attributes:
        sizes: of the mesh's axes, by name; empty without a mesh.
    """

    sizes: dict[str, int]

    @property
    def module(self) -> L.LightningModule:
        """Without the strategy's wrapper."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def layout(self) -> str:
        """The class, and the mesh's axes that are longer than 1, as one line."""
        sizes = [f"{axis}={size}" for axis, size in self.sizes.items() if size > 1]
        return " ".join([type(self).__name__, *sizes, *self.layout_notes])

    @property
    def layout_notes(self) -> list[str]:
        """What else the line says about the layout."""
        return []

    @property
    def data_size(self) -> int:
        """Size of the data axis. Batch arithmetic uses it, never the number of processes."""
        return self.world_size

    @property
    def data_rank(self) -> int:
        return self.global_rank

    @property
    def sample_ranks(self) -> list[int]:
        """One rank for each part of the data, in their order, this one among them.

        The others compute the same.
        """
        return [*range(self.world_size)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.data_size, "rank": self.data_rank}

    @property
    def stage(self) -> int:
        """This rank's stage of a pipeline; 0 without a pipeline."""
        return 0

    @property
    def ranks_per_stage(self) -> int:
        """The number of ranks that together hold one pipeline stage, or the whole model without a
        pipeline.
        """
        return self.world_size // self.sizes.get("pipe", 1)

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different parts of the model."""
        return self.world_size > self.sizes.get("replicate", self.world_size)

    @property
    def can_generate(self) -> bool:
        """True if the model can be called with any number of positions and a cache, by all ranks
        alike.
        """
        return True

    @property
    def rng_stream(self) -> int:
        """The random stream that this rank draws from.

        Ranks that compute the same must draw the same.
        """
        return self.data_rank
