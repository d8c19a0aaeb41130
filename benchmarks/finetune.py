"""Teach the default job's model an instruction format, with all weights and with adapters
(docs/finetune.md).

python -m benchmarks.finetune [--root=outputs/tutorial] [--seeds=1]

Runs the tutorial's commands, those whose results are there left out, and prints what was learned
and forgotten.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
METHODS = {  # overrides of each experiment
    "finetune": ("optimizer.lr=1e-3",),
    "finetune_lora": ("task.adapter.rank=4", "task.adapter.alpha=8", "optimizer.lr=1e-2"),
}
CHAT = ("data.source.template=plain", "data.context=256")
ASKED = 100  # held-out questions whose answers are compared word for word


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path("outputs/tutorial"))
    parser.add_argument("--seeds", type=int, default=1, help="runs of each method")
    args = parser.parse_args()
    root: Path = args.root
    prepare(root)
    chats = [f"data.path={root}/chats.jsonl", *CHAT]
    rows = {"before": [measured(root / "base", root, chat=("data=chat", *chats))]}
    for experiment, overrides in METHODS.items():
        names = [f"{experiment}-{seed}" for seed in range(args.seeds)]
        for seed, name in enumerate(names):
            words = [
                f"experiment={experiment}",
                f"model.pretrained={root}/model",
                *chats,
                "data.global_batch_size=16",
            ]
            train(root, name, *words, *overrides, "trainer.max_epochs=1", f"seed={seed}")
        rows[experiment] = [measured(root / name, root, chat=()) for name in names]
    print(table(rows))


def prepare(root: Path) -> None:
    """Train the default job, export its model, and write the conversations."""
    train(root, "base")
    if not (root / "model").exists():
        command("scripts/convert.py", root / "base", root / "model")
    if not (root / "chats.jsonl").exists():
        command("scripts/stdlib_chats.py", root / "chats.jsonl")


def train(root: Path, name: str, *words: str) -> None:
    summary = root / name / "summary.json"
    if (
        not summary.exists() or json.loads(summary.read_text())["stop_reason"] != "finished"
    ):  # else the run resumes
        command("train.py", f"run.root={root}", f"run.name={name}", *words)


def command(script: str, *words: str | Path) -> str:
    """Run one of the project's commands, and return what it printed."""
    line = [script, *map(str, words)]
    print("python", shlex.join(line), flush=True)
    result = subprocess.run(
        [sys.executable, *line], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if result.returncode:
        sys.exit(result.stdout + result.stderr)
    return result.stdout


def measured(run: Path, root: Path, *, chat: Sequence[str]) -> dict[str, float]:
    """Return held-out losses, of answers and of the library's source, and the share of right
    answers.
    """
    file = root / f"{run.name}.json"
    if file.exists():
        return json.loads(file.read_text())
    found = {}
    for name, words in (
        ("instruction loss", chat),
        ("base loss", () if chat else ("data=stdlib",)),
    ):
        printed = command("scripts/evaluate.py", run, *words, "--split", "val")
        found[name] = float(re.findall(r"val/loss +([\d.]+)", printed)[0])
    found["right answers"] = right_answers(run, root / "chats.jsonl")
    file.write_text(json.dumps(found))
    return found


def right_answers(run: Path, file: Path) -> float:
    """Return the share of held-out questions for a name or arguments that are answered word for
    word.
    """
    from armature.data import sources
    from armature.data.chat import conversations, template
    from armature.finetune import inference

    held_out = [
        each.messages
        for each in conversations.read(sources.find(str(file)), conversations.parse)
        if each.place < 0.05
    ]
    asked = [chat for chat in held_out if not chat[0]["content"].startswith("What does it do?")][
        :ASKED
    ]
    loaded = inference.load_run(run)
    answers = inference.answers(
        loaded,
        [chat[:-1] for chat in asked],
        template=template.load(run, template="plain"),
        max_new_tokens=40,
        temperature=0.0,
    )
    return mean(answer == chat[-1]["content"] for answer, chat in zip(answers, asked, strict=True))


def table(rows: dict[str, list[dict[str, float]]]) -> str:
    """Return a Markdown table; of several runs the mean, and the least and the most."""
    columns = list(rows["before"][0])
    lines = [f"| | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for name, runs in rows.items():
        cells = [
            spread([run[column] for run in runs], digits=2 if "right" in column else 3)
            for column in columns
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float], *, digits: int) -> str:
    text = f"{mean(values):.{digits}f}"
    return (
        text
        if len(values) == 1
        else f"{text} ({min(values):.{digits}f} to {max(values):.{digits}f})"
    )


if __name__ == "__main__":
    main()
