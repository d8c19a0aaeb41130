"""Writes the files of a run, for tests of its pages."""

import base64
import json
import math
from pathlib import Path

HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def write(
    path: Path,
    *,
    name: str = "mine",
    steps: int = 120,
    config: str = "",
    offset: float = 0.0,
    text: str = "def f():",
    classes: tuple[str, str] = ("7", "1"),
    finished: bool = True,
) -> Path:
    """Write a run with two starts, samples of both kinds and every table."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(
        f"run:\n  name: {json.dumps(name)}\n  report: true\nseed: 0\ncheckpoint: {{monitor: "
        f"val/loss, mode: min}}\n"
        f"optimizer: {{lr: 0.5}}\n{config}"
    )
    (path / "overrides.txt").write_text("optimizer.lr=0.5\n")
    rows = ["step,epoch,samples,tokens,lr,train/loss,train/grad_norm,val/loss,val/accuracy"]
    for step in range(1, steps + 1):
        loss = 4 * math.exp(-step / 40) + 0.1 * math.sin(step) + 0.5 + offset
        val = f"{loss:.4f},{min(0.99, step / steps):.3f}" if step % 20 == 0 else ","
        done = f"{step},{step / 50:.3f},{step * 8},{step * 512}"
        rows.append(f"{done},{0.01:.4f},{loss:.5f},{1 + loss / 9:.4f},{val}")
    (path / "metrics.csv").write_text("\n".join(rows) + "\n")
    rows = ["step,seconds_per_step,samples_per_second,tokens_per_second,data_wait,memory/peak_gib"]
    rows += [f"{step},0.2,40,{2500 + step % 7 * 20},0.01,0.5" for step in range(10, steps + 1, 10)]
    (path / "timings.csv").write_text("\n".join(rows) + "\n")
    pixels = base64.b64encode(bytes(range(0, 256, 4))).decode()
    image = {
        "width": 8,
        "height": 8,
        "pixels": pixels,
        "predicted": classes[0],
        "target": classes[1],
    }
    start = {
        "event": "start",
        "time": "2026-11-21 10:00:00",
        "ranks": 2,
        "layout": "DDP",
        "commit": "abc123",
        "host": "box",
    }
    start |= {"versions": {"torch": "2.13.0"}, "parameters": 33826, "planned_steps": steps}
    events = [
        {**start, "step": 0},
        {"event": "text", "step": 20, "text": f"{text} 20"},
        {"event": "text", "step": 60, "text": f"{text} lost"},
        {**start, "step": 50},
        {"event": "text", "step": 60, "text": f"{text} 60"},
        {"event": "images", "step": 60, "images": [image, {**image, "target": image["predicted"]}]},
    ]
    (path / "report.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if finished:
        summary = {
            "stop_reason": "finished",
            "global_step": steps,
            "planned_steps": steps,
            "seconds": 65.0,
        }
        summary |= {
            "metrics": {"test/loss": 0.6 + offset},
            "tokens_per_second": 2550.0,
            "peak_memory_bytes": 2**30,
        }
        (path / "summary.json").write_text(json.dumps(summary))
    return path
