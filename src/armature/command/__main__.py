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
    os.environ.setdefault("ARMATURE_PROJECT", os.getcwd())
    from armature import cli, project
    from armature.launcher import environment

    environment.share_sources()
    sys.path[:0] = project.IMPORTED
    scripts = {file.stem: str(file) for file in project.shipped("scripts").glob("*.py")}
    names = ["train", "copy", "schema", *sorted({*scripts} - OF_A_CLONE)]
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(f"{__doc__}{', '.join(names[3:])}")
    elif name not in names:
        cli.refuse([f"armature {name}: there is no such command. Type {', '.join(names)}."])
    elif name == "copy":
        for option in words:
            copy(option)
    elif name == "schema":
        from armature.command import schema

        schema.write()
    else:
        sys.argv = [f"armature {name}", *words]
        if name in scripts:
            runpy.run_path(scripts[name], run_name="__main__")
        else:
            from armature import train

            train.command()


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
