"""Let the tests parse each YAML text and each interpolation once: hundreds of them compose the same
files.
"""

import functools
import sys
from typing import Any

import yaml
from omegaconf import grammar_parser, omegaconf

_parsed: dict[str, Any] = {}


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
            text = stream.read()
            if text not in _parsed:
                _parsed[text] = yaml.load(text, Loader=Loader)
            return _parsed[text]
        except yaml.YAMLError:  # its message names the file
            stream.seek(0)
            return yaml.load(stream, Loader=Loader)


def remember() -> None:
    omegaconf.yaml = _Yaml()  # pyright: ignore[reportAttributeAccessIssue]
    parse = grammar_parser.parse
    for name, module in list(sys.modules.items()):
        if name.startswith("omegaconf.") and getattr(module, "parse", None) is parse:
            module.parse = functools.cache(parse)  # pyright: ignore[reportAttributeAccessIssue]
