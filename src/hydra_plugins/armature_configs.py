"""Let Hydra look for a group's option among the shipped ones, after the project's own configs/."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from armature import project


class ShippedConfigs(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if project.SHIPPED != project.CONFIGS:
            search_path.append("armature", f"file://{project.SHIPPED}")
