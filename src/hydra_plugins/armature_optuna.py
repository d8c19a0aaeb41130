"""`sweep=optuna`, where Hydra looks for plugins.

Every command imports this; the work is in src/armature/sweeps/.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


@dataclass
class Settings:
    _target_: str = "hydra_plugins.armature_optuna.OptunaSweeper"
    trials: int = 20
    sampler: dict[str, Any] = field(default_factory=lambda: {"name": "TPESampler", "seed": 0})
    pruner: dict[str, Any] | None = None
    storage: str | None = None
    params: dict[str, Any] = field(default_factory=dict)


class OptunaSweeper(Sweeper):
    """Ask Optuna for the values of one trial after the other."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.config, self.hydra_context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        from armature.sweeps import search

        settings = OmegaConf.to_container(OmegaConf.create(self.settings), resolve=True)
        search.run(self.config, settings, arguments, launcher=self.launcher)  # pyright: ignore[reportArgumentType]


ConfigStore.instance().store(
    group="hydra/sweeper", name="armature_optuna", node=Settings, provider="armature"
)
