"""Let the tests parse each YAML text and each interpolation once: hundreds of them compose the same
files.
"""

import functools
import sys
from typing import Any

import yaml
from omegaconf import grammar_parser, omegaconf
from omegaconf._utils import get_yaml_loader


class _Yaml:
    """The module yaml, with a `load` that remembers what it has parsed.

    OmegaConf copies what it gets.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(yaml, name)

    def load(self, stream: Any, Loader: Any) -> Any:
        if not hasattr(stream, "seek"):
            return yaml.load(stream, Loader=Loader)
        try:
            return _parsed(stream.read())
        except yaml.YAMLError:  # its message names the file
            stream.seek(0)
            return yaml.load(stream, Loader=Loader)


@functools.cache
def _parsed(text: str) -> Any:
    return yaml.load(text, Loader=get_yaml_loader())


def remember() -> None:
    omegaconf.yaml = _Yaml()  # pyright: ignore[reportAttributeAccessIssue]
    parse = grammar_parser.parse
    for name, module in list(sys.modules.items()):
        if name.startswith("omegaconf.") and getattr(module, "parse", None) is parse:
            module.parse = functools.cache(parse)  # pyright: ignore[reportAttributeAccessIssue]
