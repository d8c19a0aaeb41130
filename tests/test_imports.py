"""What a run may load: everything that it loads costs each start time and memory, on every rank."""

import json
import sys

import pytest

from tests import running

pytestmark = pytest.mark.slow

OURS = {
    "hydra",
    "omegaconf",
    "antlr4",
    "yaml",
    "lightning",
    "lightning_utilities",
    "torchmetrics",
    "torch",
    "numpy",
    *("psutil", "filelock", "dotenv", "tokenizers", "safetensors"),
    *("typing_extensions", "packaging"),
    *("pydantic", "pydantic_core", "annotated_types", "typing_inspection"),
}
WITH_OTHERS = {
    # of Lightning; torchmetrics looks at each metric
    *("rich", "tqdm", "fsspec", "scipy", "regex", "_distutils_hack"),
    # of torch
    *("sympy", "mpmath", "torchgen", "charset_normalizer"),
    # of these only where something else has installed them; Hydra looks at all of its plugins
    *("PIL", "attr", "dill", "boto3", "botocore", "s3transfer", "jmespath", "dateutil", "urllib3"),
    *("certifi", "hydra_plugins"),
}
TENSORBOARD = {
    *("tensorboard", "google", "absl", "six"),
    # Lightning's TensorBoardLogger asks s3fs whether its folder is a bucket
    *("s3fs", "aiobotocore", "aiohappyeyeballs", "aiohttp", "aioitertools", "aiosignal", "anyio"),
    *("frozenlist", "httpx2", "idna", "multidict", "propcache", "sniffio", "wrapt", "yarl"),
}
NEVER = {
    "wandb",
    "transformers",
    "deepspeed",
    "matplotlib",
    "pandas",
    "sklearn",
    "torchao",
    "upath",
    "datasets",
}

SCRIPT = """
import gc, json, runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    tops = {name.partition(".")[0] for name, file in files.items() if "-packages/" in file}
    print("FROZEN", gc.get_freeze_count())
    packages = sorted(top for top in tops if hasattr(sys.modules.get(top), "__path__"))
    print("LOADED", json.dumps(packages))
"""


def loaded(*overrides: str, corpus, folder) -> tuple[set[str], int]:
    """The packages, and how many objects collecting garbage leaves out."""
    launcher = [sys.executable, "-c", SCRIPT, str(running.ROOT / "train.py")]
    command = running.command(*overrides, corpus=corpus, launcher=launcher)
    done = running.run(command, cwd=folder, env=running.environment(), fork=False)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("LOADED "))
    (frozen,) = (line.split()[1] for line in done.stdout.splitlines() if line.startswith("FROZEN "))
    return set(json.loads(line.removeprefix("LOADED "))), int(frozen)


@pytest.mark.parametrize("logger", ["none", "tensorboard"])
def test_a_run_loads_what_it_uses_and_no_more(logger, corpus, cache, tmp_path):
    found, frozen = loaded(f"logger={logger}", corpus=corpus, folder=tmp_path)
    assert "lightning" in found
    assert (
        frozen > 100_000
    )  # the imports' objects: going through them takes 0.8 s of the first sixty steps
    assert not found & NEVER
    allowed = OURS | WITH_OTHERS | (TENSORBOARD if logger == "tensorboard" else set())
    assert found <= allowed, f"loaded and not listed: {sorted(found - allowed)}"
