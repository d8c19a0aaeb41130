r"""Print a batch of training data as the model gets it: text, and in color what is learned.

python scripts/show_batch.py data=chat data.path=chats.jsonl data.source.tokenizer=path/to/model
python scripts/show_batch.py experiment=dpo model.pretrained=path/to/model data.path=pairs.jsonl \
    --rows 2
python scripts/show_batch.py data=text data.path=book.txt --step 3 --rows 2

Takes train.py's command line. In a file or a pipe, where there is no color, what is learned stands
between ⟦ and ⟧.
"""

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from armature import cli
from armature.errors import ConfigError
from armature.training.limits import prefer_typed
from armature.validation import checks

MOST_STEPS = 10**9
PROCESSES = (
    "strategy",
    "trainer.devices=",
    "trainer.num_nodes=",
)  # the batch is read in one process


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--step", type=int, default=0, help="of training, from 0")
    parser.add_argument("--rows", type=int, default=4, help="of its global batch, from the first")
    arguments, typed = cli.parse_overrides(parser, purpose=", as for train.py")
    try:
        if not 0 <= arguments.step <= MOST_STEPS or arguments.rows < 1:
            least = f"type a step from 0 to {MOST_STEPS} and at least 1 row."
            raise ConfigError(f"--step {arguments.step} --rows {arguments.rows}: {least}")
        show(
            composed(typed),
            step=arguments.step,
            rows=arguments.rows,
            console=Console(highlight=False),
        )
    except ConfigError as error:
        cli.refuse(error.problems)


def composed(typed: list[str]) -> DictConfig:
    """Return the configuration, checked as before a launch, with the data prepared.

    Raises ConfigError.
    """
    cli.compose(typed)  # refuses a misspelt strategy, too
    kept = [each for each in typed if not each.startswith(PROCESSES)]
    alone = [
        *kept,
        "strategy=single",
        "trainer.devices=1",
        "trainer.num_nodes=1",
        "checkpoint.root=null",
    ]
    return checks.check(prefer_typed(cli.compose(alone), alone))


def show(cfg: DictConfig, *, step: int, rows: int, console: Console) -> None:
    from armature.data.feed import build

    feed = build(cfg)
    data: Any = feed.data
    data.prepare_data()
    feed.set_up()
    feed.samples_seen = step * feed.global_batch_size
    batch = next(iter(feed.train_loader()))
    console.print(
        f"{type(data).__name__}, step {step}, a micro-batch of " + described(batch), markup=False
    )
    tokenizer = getattr(data, "tokenizer", None)
    if (
        tokenizer is None
        or not isinstance(batch, dict)
        or not {"inputs", "targets"} <= batch.keys()
    ):
        return
    of_pairs = batch["inputs"].ndim == 3  # (pairs, 2, tokens), as data=preference
    if of_pairs:
        batch, rows = {name: batch[name].flatten(0, 1) for name in ("inputs", "targets")}, 2 * rows
    for row in range(min(rows, len(batch["inputs"]))):
        learned = int((batch["targets"][row] != -100).sum())
        name = f"pair {row // 2}, {('chosen', 'rejected')[row % 2]}" if of_pairs else f"row {row}"
        console.rule(f"{name}: {learned} of {len(batch['targets'][row])} targets are learned")
        for document in texts(batch, row, tokenizer, colored=console.is_terminal):
            console.print(document, soft_wrap=True)


def described(batch: Any) -> str:
    """Return the shapes and types of a batch's tensors."""
    if isinstance(batch, dict):
        return "{" + ", ".join(f"{key}: {described(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, list | tuple):
        return "[" + ", ".join(map(described, batch)) + "]"
    return (
        f"{tuple(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
        if hasattr(batch, "shape")
        else repr(batch)
    )


def texts(batch: dict[str, Any], row: int, tokenizer: Any, *, colored: bool) -> Iterator[Text]:
    """Yield a row's documents, each up to its last target, without the padding after it."""
    inputs, targets = batch["inputs"][row].tolist(), batch["targets"][row].tolist()
    documents = batch["documents"][row].tolist() if "documents" in batch else [0] * len(inputs)
    for _, group in groupby(range(len(inputs)), key=documents.__getitem__):
        places = list(group)
        while places and targets[places[-1]] == -100:
            places.pop()
        if places:
            learned = [
                False,
                *(targets[i] != -100 for i in places),
            ]  # each token is the target of the one before it
            tokens = [*(inputs[i] for i in places), targets[places[-1]]]
            yield painted(list(zip(tokens, learned, strict=True)), tokenizer, colored=colored)


def painted(tokens: list[tuple[int, bool]], tokenizer: Any, *, colored: bool) -> Text:
    """Return tokens (id, whether it is learned) as text."""
    text = Text()
    for learned, group in groupby(tokens, key=lambda token: token[1]):
        part = tokenizer.decode([token for token, _ in group], skip_special_tokens=False)
        if colored:
            text.append(part, style="bold green" if learned else "dim")
        else:
            text.append(f"⟦{part}⟧" if learned else part)
    return text


if __name__ == "__main__":
    main()
