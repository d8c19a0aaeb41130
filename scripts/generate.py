"""Sample text from a trained language model.

python scripts/generate.py outputs/<run.name>
python scripts/generate.py outputs/<run.name> --prompt "def main(" --temperature 0.8 --seed 1
python scripts/generate.py outputs/<run.name> --chat
    a model that was trained on conversations answers yours
python scripts/generate.py outputs/<run.name> --chat --prompt "What is a rank?"
"""

import argparse
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from armature import cli
from armature.errors import ConfigError


def main() -> None:
    parser = cli.run_parser(__doc__)
    parser.add_argument(
        "--prompt",
        action="append",
        help="the text to continue (def); several are continued together",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="each --prompt is a user's message; without one, ask for them",
    )
    parser.add_argument(
        "--tokens", type=int, default=200, help="how many tokens to add at the most"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token each time"
    )
    parser.add_argument("--top-k", type=int, help="choose among the k likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, help="choose among the fewest tokens whose probability reaches p"
    )
    parser.add_argument("--samples", type=int, default=1, help="of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    args = cli.parse_arguments(parser)
    cli.refuse_training_keys(args.overrides)
    try:
        check(args)
        generate(args)
    except (ConfigError, ValueError) as error:
        cli.refuse(getattr(error, "problems", [str(error)]))


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for options out of range."""
    rules = {
        "tokens": args.tokens >= 1,
        "samples": args.samples >= 1,
        "seed": 0 <= args.seed < 2**63,
        "temperature": 0 <= args.temperature < math.inf,
        "top_k": args.top_k is None or args.top_k >= 1,
        "top_p": args.top_p is None or 0 < args.top_p <= 1,
    }
    ranges = {
        "temperature": "a number from 0",
        "top_p": "a number above 0, up to 1",
        "seed": "a whole number from 0",
    }
    problems = [
        f"--{name.replace('_', '-')} {getattr(args, name)}: must be "
        f"{ranges.get(name, 'a whole number of at least 1')}."
        for name, good in rules.items()
        if not good
    ]
    if problems:
        raise ConfigError(problems)


def generate(args: argparse.Namespace) -> None:
    device = {"gpu": "cuda"}.get(name := cli.accelerator(args.accelerator), name)

    import torch

    from armature.finetune import inference
    from armature.models.decoder import generation

    loaded = inference.load_run(
        args.path, device=device, best=args.best, overrides=args.overrides, trust=args.trust
    )
    options = {
        "max_new_tokens": args.tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "generator": torch.Generator(device).manual_seed(args.seed),
    }
    if args.chat:
        answer = partial(
            inference.answers, loaded, template=chat_template(loaded.folder), **options
        )
        if args.prompt is None:
            talk(answer)
            return
        chats = [
            [{"role": "user", "content": prompt}]
            for prompt in args.prompt
            for _ in range(args.samples)
        ]
        printed(answer(chats))
        return
    tokenizer = loaded.tokenizer
    prompts = [
        tokenizer.encode(prompt).ids
        for prompt in args.prompt or ["def"]
        for _ in range(args.samples)
    ]
    if not all(prompts):
        raise ConfigError("--prompt is empty: give at least one character.")
    texts = generation.complete(loaded.model, prompts, eot=loaded.ends, **options)
    printed([tokenizer.decode(text) for text in texts])


def printed(texts: list[str]) -> None:
    for text in texts:
        print(text)
        if len(texts) > 1:
            print("-" * 40)


def chat_template(folder: Path) -> Any:
    """Return the chat template of a run or a model.

    Raises ConfigError if it was not trained on conversations.
    """
    from armature.data.chat import template
    from armature.finetune import folder as model_folder

    if model_folder.chat_template(folder) is None:
        raise ConfigError(
            f"--chat: {folder} has no {model_folder.CHAT_TEMPLATE}: it was not trained on "
            "conversations (data=chat). "
            "Leave --chat out."
        )
    return template.load(folder, template=None)


def talk(answer: Any) -> None:
    """Ask for messages until the input ends, and print the answers."""
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = input("you: ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": answer([messages])[0]})
            print(messages[-1]["content"])


if __name__ == "__main__":
    main()
