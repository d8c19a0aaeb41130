"""Start train.py on the modules of tests/plain_parts.py."""

from pathlib import Path

from tests import running
from tests.forked import Ended, Forks

CONFIGS = str(running.ROOT / "tests" / "plain_configs")
LINE = "task._target_=tests.plain_parts.Line"
LAYOUTS = {"single": (), "ddp": ("strategy=ddp",), "fsdp": ("strategy=fsdp",)}


class PlainRuns:
    """Runs below one folder, in directories of their own."""

    def __init__(self, forks: Forks) -> None:
        self.forks, self.count = forks, 0

    def new(self) -> Path:
        self.count += 1
        return self.forks.cwd / "outputs" / f"{self.count:03d}"

    def train(
        self,
        *overrides: str,
        layout: str = "single",
        ranks: int | None = None,
        run_dir: Path | None = None,
        expect: int = 0,
    ) -> tuple[Path, Ended]:
        run_dir, ranks = run_dir or self.new(), ranks or (1 if layout == "single" else 2)
        words = ("--config-dir", CONFIGS, "experiment=plain", *LAYOUTS[layout], *overrides)
        words = (*words, f"trainer.devices={ranks}", f"run.name={run_dir.name}")
        return run_dir, self.forks.train(*words, ranks=ranks, expect=expect, seconds=120)


def stop_at(step: int) -> str:
    signals = f"{{SIGTERM:{step}}}"
    return f"+callbacks.stop_at={{_target_:armature.callbacks.stop_at.StopAt,signals:{signals}}}"


def column(run_dir: Path, name: str) -> list[float]:
    return [float(row[name]) for row in running.rows(run_dir) if row.get(name)]
