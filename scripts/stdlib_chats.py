"""Write conversations about functions of Python's standard library, to fine-tune the default job's
model on.

python scripts/stdlib_chats.py chats.jsonl

The user shows the beginning of a function and asks for its name, its arguments, or what it does:
the answer to the
last is the first sentence of its docstring, which is not shown. Functions of the files that the
default data hold out (data=stdlib) are left out, so the loss on these files still shows what the
model knew before.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from armature import cli
from armature.data import sources

LINES, CHARACTERS = 8, 320  # of a function that is shown
QUESTIONS = {
    "name": "What is this function called?",
    "arguments": "Which arguments does it take?",
    "purpose": "What does it do?",
}


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("target", type=Path, help="the .jsonl file to write")
    parser.add_argument(
        "--most", type=int, default=4000, help="conversations, chosen by a hash of the prompt"
    )
    args = parser.parse_args()
    problems = cli.output_problems("", args.target, ".jsonl")
    if args.most < 1:
        problems.append(f"--most {args.most}: must be at least 1.")
    if problems:
        cli.refuse(problems)
    found = [
        chat
        for file in training_files()
        for chat in conversations(file.read_text(encoding="utf-8"))
    ]
    chosen = sorted(found, key=lambda chat: sources.hash_place(chat["prompt"]))[: args.most]
    cli.write_output("", args.target, "".join(f"{json.dumps(chat)}\n" for chat in chosen))
    print(f"{args.target}: {len(chosen):,} conversations of {len(found):,}")


def training_files() -> list[Path]:
    """Return the files of the library that data=stdlib trains on, by its default shares."""
    files = sources.standard_library()
    split = sources.Splitter.choose(files, val_fraction=0.05, test_fraction=0.05)
    return [file.path for file in files if split(file, 0) == "train"]


def conversations(code: str) -> Iterator[dict[str, str]]:
    """Yield prompt and completion for each function with a docstring in a file's text."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):  # some of the library's files are not meant to parse
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not (docstring := ast.get_docstring(node)):
            continue
        arguments = ", ".join(f"`{each.arg}`" for each in (*node.args.posonlyargs, *node.args.args))
        purpose = re.split(r"(?<=\.)\s|\n\n", docstring, maxsplit=1)[0]
        answers = {
            "name": f"It is called `{node.name}`.",
            "arguments": f"It takes {arguments}." if arguments else "It takes no arguments.",
            "purpose": " ".join(purpose.split()),
        }  # fmt: skip
        for kind, answer in answers.items():
            if len(answer) <= 120:
                yield {"prompt": f"{QUESTIONS[kind]}\n\n{shown(node)}", "completion": answer}


def shown(node: ast.FunctionDef) -> str:
    """Return the first lines of a function, without its docstring."""
    bare = ast.FunctionDef(**dict(ast.iter_fields(node)))
    bare.body, bare.decorator_list = node.body[1:] or [ast.Pass()], []
    lines = ast.unparse(ast.fix_missing_locations(bare)).splitlines()[:LINES]
    return "\n".join(lines)[:CHARACTERS]


if __name__ == "__main__":
    main()
