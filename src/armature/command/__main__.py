"""Train, and all that belongs to it, in the project of the current folder.

armature train strategy=fsdp trainer.devices=4     as train.py of a clone
armature new my_project                            a folder with a model, data, task and test
armature copy strategy/fsdp                        a shipped file into configs/, to change it
armature schema                                    configs/.schema/ anew, which editors read
armature evaluate outputs/<run.name>               as scripts/evaluate.py, and so are
"""

import os
import runpy
import shutil
import sys

OF_A_CLONE = {"notebooks", "reference", "size", "stdlib_chats"}


def main() -> None:
    enter()
    from armature import cli, project

    folder = project.shipped("scripts")
    scripts = {file.stem: file for file in folder.glob("*.py") if file.stem not in OF_A_CLONE}
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(f"{__doc__}{', '.join(sorted(scripts))}")
    elif name == "copy":
        for option in words or ["GROUP/NAME"]:
            copy(option)
    elif name == "schema":
        from armature.command import schema

        schema.write()
    elif name == "train" or name in scripts:
        sys.argv = [f"armature {name}", *words]
        # a file, which a sweep starts again for its trials
        file = scripts.get(name, folder / "project" / "train.py")
        runpy.run_path(str(file), run_name="__main__")
    else:
        known = ", ".join(["train", "copy", "schema", *sorted(scripts)])
        cli.refuse([f"armature {name}: there is no such command. Type {known}."])


def enter() -> None:
    """Let this process and those that it starts work on the project of the current folder."""
    os.environ.setdefault("ARMATURE_PROJECT", os.getcwd())
    from armature import project
    from armature.launcher import environment

    environment.share_sources()
    sys.path[:0] = project.IMPORTED


def copy(option: str) -> None:
    """Copy a shipped file into the project's configs/, which Hydra reads first."""
    from armature import cli, project

    group = option.partition("/")[0]
    source, target = project.SHIPPED / f"{option}.yaml", project.ROOT / f"configs/{option}.yaml"
    if not source.is_file():
        known = ", ".join(project.options(group)) or "none: type GROUP/NAME"
        cli.refuse([f"armature copy {option}: no such file. Options of {group}: {known}."])
    if target.exists():
        cli.refuse([f"{target} exists already. Change it there."])
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
    print(target)


if __name__ == "__main__":
    main()
