"""Sample text from a trained language model.

python scripts/generate.py outputs/<run.name>
python scripts/generate.py outputs/<run.name> --prompt "def main(" --temperature 0.8 --top-p 0.95 --seed 1
python scripts/generate.py outputs/<run.name> --chat   # a model that was trained on conversations answers yours
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
    parser.add_argument("--prompt", action="append", help="the text to continue (def); several are continued together")
    parser.add_argument(
        "--chat", action="store_true", help="each --prompt is a user's message; without one, ask for them"
    )
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to add at the most")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token each time")
    parser.add_argument("--top-k", type=int, help="choose among the k likeliest tokens")
    parser.add_argument("--top-p", type=float, help="choose among the fewest tokens whose probability reaches p")
    parser.add_argument("--samples", type=int, default=1, help="of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    args = cli.parse_arguments(parser)
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
        "temperature": "a number from 0", "top_p": "a number above 0, up to 1", "seed": "a whole number from 0",
    }  # fmt: skip
    problems = [
        f"--{name.replace('_', '-')} {getattr(args, name)}: must be {ranges.get(name, 'a whole number of at least 1')}."
        for name, good in rules.items()
        if not good
    ]
    if problems:
        raise ConfigError(problems)


def generate(args: argparse.Namespace) -> None:
    from armature.loading import open_run

    cfg, checkpoint = open_run(args.path, best=args.best, overrides=args.overrides, trust=args.trust)

    import torch

    from armature.data import tokenizer as tokens
    from armature.loading import load_task
    from armature.models.decoder import generation

    file = Path(cfg.run.dir) / tokens.TOKENIZER_FILE
    if not file.exists():
        raise ConfigError(f"{args.path}: this run's data have no tokenizer, so there is no text to sample.")
    try:
        tokenizer = tokens.read(file)
    except ConfigError as error:
        raise ConfigError(f"{error} Copy it from another run on the same data.") from error
    device = {"gpu": "cuda"}.get(name := cli.accelerator(args.accelerator), name)
    template = chat_template(file) if args.chat else None
    model = load_task(cfg, checkpoint).get_submodule("model").to(device)
    options = {
        "max_new_tokens": args.tokens, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p,
        "generator": torch.Generator(device).manual_seed(args.seed),
    }  # fmt: skip
    if template is not None:
        answer = partial(answers, model=model, tokenizer=tokenizer, template=template, **options)
        if args.prompt is None:
            talk(answer)
            return
        chats = [[{"role": "user", "content": prompt}] for prompt in args.prompt for _ in range(args.samples)]
        printed(answer(chats))
        return
    prompts = [tokenizer.encode(prompt).ids for prompt in args.prompt or ["def"] for _ in range(args.samples)]
    if not all(prompts):
        raise ConfigError("--prompt is empty: give at least one character.")
    texts = generation.complete(model, prompts, eot=tokens.document_token(tokenizer), **options)
    printed([tokenizer.decode(text) for text in texts])


def printed(texts: list[str]) -> None:
    for text in texts:
        print(text)
        if len(texts) > 1:
            print("-" * 40)


def chat_template(tokenizer_file: Path) -> Any:
    """Return the run's chat template. Raises ConfigError if it was not trained on conversations."""
    from armature.data.chat import template
    from armature.finetune.folder import CHAT_TEMPLATE

    if not tokenizer_file.with_name(CHAT_TEMPLATE).is_file():
        raise ConfigError(
            f"--chat: {tokenizer_file.parent} has no {CHAT_TEMPLATE}: it was not trained on conversations (data=chat). "
            "Leave --chat out."
        )
    return template.load(tokenizer_file.parent, template=None)


def answers(
    chats: list[list[dict[str, str]]], *, model: Any, tokenizer: Any, template: Any, **options: Any
) -> list[str]:
    """Return the assistant's next message in each conversation."""
    from armature.models.decoder import generation

    texts = [template.render(messages, add_generation_prompt=True) for messages in chats]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    room = int(model.context)
    prompts = [prompt[-(room - 1) :] for prompt in prompts]
    end = template.end_of_turn
    last = tokenizer.encode(end, add_special_tokens=False).ids if end else []
    found = generation.complete(model, prompts, eot=last[0] if len(last) == 1 else None, **options)
    new = [ids[len(prompt) :] for ids, prompt in zip(found, prompts, strict=True)]
    decoded = (tokenizer.decode(ids, skip_special_tokens=False) for ids in new)
    return [(text.partition(end)[0] if end else text).strip() for text in decoded]


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
