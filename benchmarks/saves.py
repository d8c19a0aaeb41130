"""What a checkpoint costs: the save itself, and the steps after it, whose cores a save in the
background shares.

python -m benchmarks --saves
    the section of the benchmark
PYTHONPATH=src python -m benchmarks.saves MEGABYTES ROUNDS DEVICE FOLDER
    its measurement, as JSON
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.rounds import spread

STEPS = 20  # after a save
WIDTH, ROWS, TRAINED = (
    768,
    256,
    2,
)  # blocks that a step trains: one that takes long varies by more than a save costs
KINDS = ("write", "foreground", "background")


def measure(folder: Path, *, megabytes: int, rounds: int, device: str) -> dict[str, Any]:
    """Return seconds by kind of save, one value per round.

    A round writes and syncs the same bytes to a file, saves in the foreground, and saves in the
    background. `call` is what the call takes; `lost` what the call and STEPS steps take beyond as
    many steps before it; `complete` the call and the wait for the save after those steps.
    """
    import torch

    from armature.checkpoint import directory
    from armature.checkpoint.writer import CheckpointWriter
    from armature.launcher import heap

    heap.keep_freed_memory(device)
    step, tensors = _training(megabytes, device=device)
    writers = {
        name: CheckpointWriter(background=name == "background", idle=device == "cpu")
        for name in KINDS[1:]
    }

    def write() -> None:
        with (folder / "raw").open("wb", buffering=0) as file:
            for value in tensors.values():
                file.write(memoryview(value.detach().cpu().reshape(-1).view(torch.uint8).numpy()))
            os.fsync(file.fileno())

    found: dict[str, Any] = {name: {"call": [], "lost": [], "complete": []} for name in KINDS}
    usual = 0.0
    for number in range(rounds + 1):  # the first one touches memory and files for the first time
        for name in KINDS if number % 2 else KINDS[::-1]:
            (folder / "raw").unlink(missing_ok=True)
            directory.remove(folder / "step=1")
            before = sum(_seconds(step, device) for _ in range(STEPS // 2))
            began = time.perf_counter()
            write() if name == "write" else writers[name].save(folder / "step=1", tensors, {})
            called = time.perf_counter()
            for _ in range(STEPS):
                _seconds(step, device)
            stepped = time.perf_counter()
            if name != "write":
                writers[name].finish()
            finished = time.perf_counter()
            usual = (before + sum(_seconds(step, device) for _ in range(STEPS // 2))) / STEPS
            if number:
                found[name]["call"].append(called - began)
                found[name]["lost"].append(stepped - began - STEPS * usual)
                found[name]["complete"].append(called - began + finished - stepped)
    size = sum(value.nbytes for value in tensors.values())
    return {
        "bytes": size,
        "steps": STEPS,
        "step_seconds": usual,
        "device": device,
        "seconds": found,
    }


def _training(megabytes: int, *, device: str) -> tuple[Callable[[], None], dict[str, Any]]:
    """Return a step that trains the first blocks of a model, and the model's weights and optimizer
    state: MEGABYTES.
    """
    import torch
    from torch import nn

    torch.manual_seed(0)
    pairs = max(1, round(megabytes * 1e6 / 12 / (8 * WIDTH**2)))
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(pairs)
    )
    model = nn.Sequential(*blocks).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    inputs = torch.randn(ROWS, WIDTH, device=device)

    def step() -> None:
        model[:TRAINED](inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model(inputs).square().mean().backward()
    optimizer.step()  # each parameter gets its state
    optimizer.zero_grad()
    tensors = {}
    for name, param in model.named_parameters():
        tensors[f"model.{name}"] = param.detach()
        tensors |= {
            f"optimizer.{name}.{key}": value for key, value in optimizer.state[param].items()
        }
    return step, tensors


def _seconds(step: Callable[[], None], device: str) -> float:
    import torch

    began = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def table(section: dict[str, Any]) -> list[str]:
    seconds = section["seconds"]
    write, foreground, background = (seconds[name] for name in KINDS)

    def row(name: str, values: list[float], over: str, reference: list[float]) -> str:
        shown = (
            f"{spread([a / b for a, b in zip(values, reference, strict=True)])} of {over}"
            if over
            else ""
        )
        return f"| {name} | {spread(values)} | {shown} |"

    return [
        f"{section['bytes'] / 1e9:.2f} GB of weights and optimizer state, steps of "
        f"{section['step_seconds']:.2f} s; "
        f"medians and quartiles of {len(write['call'])} interleaved rounds. Time lost: the save "
        f"and {section['steps']} "
        f"steps after it, less {section['steps']} steps before it.",
        "",
        "| | seconds | relative |",
        "| --- | ---: | ---: |",
        row("the same bytes, written and synced", write["call"], "", write["call"]),
        row("a save in the foreground", foreground["call"], "that", write["call"]),
        row("time lost by it", foreground["lost"], "", write["call"]),
        row(
            "a save in the background: the call",
            background["call"],
            "the foreground's",
            foreground["call"],
        ),
        row("time lost by it", background["lost"], "the foreground's", foreground["lost"]),
        row(
            "the call, and waiting for the save after the steps",
            background["complete"],
            "",
            write["call"],
        ),
    ]


if __name__ == "__main__":
    size, rounds, device, folder = sys.argv[1:]
    print(json.dumps(measure(Path(folder), megabytes=int(size), rounds=int(rounds), device=device)))
