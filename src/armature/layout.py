"""How a run is spread over processes: worked out once by the command's check, and once by each
rank. Torch-free.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from armature.errors import ConfigError
from armature.launcher import environment
from armature.models.plan import Plan, plan_beside
from armature.parallel import mesh
from armature.validation import signatures

STRATEGIES = {
    "single": "armature.strategies.single.SingleDevice",
    "ddp": "armature.strategies.ddp.DDP",
    "mesh": "armature.strategies.mesh.MeshStrategy",
    "deepspeed": "armature.strategies.deepspeed.DeepSpeed",
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What follows from the strategy, the number of processes and the model's plan."""

    kind: str  # single, ddp, mesh, deepspeed, or other for a user's own strategy class
    # the strategy's, with its constructor's defaults for those not in the configuration
    options: Mapping[str, Any]
    world_size: int  # processes of the run
    # ranks that each see different samples: the world without the context, tensor and pipeline axes
    data_ranks: int
    axes: Mapping[str, int]  # sizes of the mesh's axes; each 1 for the other kinds
    plan: Plan | None  # next to the model

    @classmethod
    def of(cls, cfg: DictConfig) -> "Layout":
        """Return the layout of a configuration with its `auto` values decided.

        ConfigError: the axes do not fit.
        """
        signatures.allow(cfg.launch.allowed_packages)
        uses_model = signatures.accepted(cfg.task, ["model"])
        definition = signatures.find_definition(cfg.model._target_) if uses_model else None
        strategy: dict[str, Any] = OmegaConf.to_container(cfg.strategy, resolve=True)  # pyright: ignore[reportAssignmentType]
        plan = plan_beside(definition.__module__) if definition is not None else None
        return cls.resolve(strategy, world_size=world_size(cfg), plan=plan)

    @classmethod
    def resolve(
        cls, strategy: Mapping[str, Any], *, world_size: int, plan: Plan | None = None
    ) -> "Layout":
        kind = _kind(str(strategy["_target_"]), world_size=world_size)
        options = (
            {**signatures.defaults_of(STRATEGIES[kind]), **strategy}
            if kind in STRATEGIES
            else strategy
        )
        axes: dict[str, int] = dict.fromkeys(mesh.AXES, 1)
        data_ranks = world_size
        if kind == "mesh":
            try:
                axes = mesh.resolve(
                    {axis: options[axis] for axis in mesh.AXES}, world_size=world_size
                )
            except ValueError as error:
                raise ConfigError(str(error)) from None
            data_ranks = axes["replicate"] * axes["shard"]
        return cls(
            kind=kind,
            options=options,
            world_size=world_size,
            data_ranks=data_ranks,
            axes=axes,
            plan=plan,
        )

    @property
    def methods(self) -> list[str]:
        """Return the kinds that `validation.combinations` asks for: of a mesh, one per axis
        longer than 1.
        """
        if self.kind == "deepspeed":
            return ["deepspeed", "zero3"] if self.options["stage"] == 3 else ["deepspeed"]
        if self.kind != "mesh":
            return [self.kind]
        axes = self.axes
        sizes = {
            "shard": axes["replicate"] * axes["shard"] * axes["context"],
            "context": axes["context"],
            "tensor": axes["tensor"],
            "pipeline": axes["pipe"],
        }
        return [name for name, size in sizes.items() if size > 1] or ["shard"]


def world_size(cfg: DictConfig) -> int:
    """Return the number of processes: those that a launcher has started, else devices ×
    machines.
    """
    return (
        environment.world_size()
        if environment.is_joined()
        else cfg.trainer.devices * cfg.trainer.num_nodes
    )


def _kind(target: str, *, world_size: int) -> str:
    name = target.rpartition(".")[2]
    if not target.startswith("armature.strategies."):
        return "other"
    if name == "auto":
        return "single" if world_size == 1 else "ddp"
    return next((kind for kind, path in STRATEGIES.items() if path.endswith(f".{name}")), "other")
