"""The launcher of every sweep and the sweeper of `sweep=optuna`, where Hydra looks for plugins.

Every command imports this; the work is in src/armature/sweeps/.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


@dataclass
class LauncherSettings:
    _target_: str = "hydra_plugins.armature_sweeps.TrialLauncher"


@dataclass
class SweeperSettings:
    _target_: str = "hydra_plugins.armature_sweeps.OptunaSweeper"
    trials: int = 20
    sampler: dict[str, Any] = field(default_factory=lambda: {"name": "TPESampler", "seed": 0})
    pruner: dict[str, Any] | None = None
    params: dict[str, Any] = field(default_factory=dict)


class TrialLauncher(BasicLauncher):
    """Run trials in this process, or side by side in processes of their own (sweep.parallel)."""

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from armature.sweeps import pool

        pool.run_grid(self, job_overrides, first=initial_job_idx)
        return []

    def results(self, trials: Iterator[Any], *, asked: int) -> Iterator[Any]:
        from armature.sweeps import pool

        return pool.results(self, trials, asked=asked)

    def run_here(self, number: int, overrides: Sequence[str]) -> JobReturn:
        """Run one trial in this process."""
        (job,) = super().launch([overrides], initial_job_idx=number)
        return job


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


for _group, _name, _node in (
    ("hydra/launcher", "armature", LauncherSettings),
    ("hydra/sweeper", "armature_optuna", SweeperSettings),
):
    ConfigStore.instance().store(group=_group, name=_name, node=_node, provider="armature")
