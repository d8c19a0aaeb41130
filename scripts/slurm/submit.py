"""Submit a run to Slurm: a file in scripts/slurm/clusters/ describes the job, overrides the
training.

    python scripts/slurm/submit.py slurm=gpu slurm.nodes=2 model=llama3_1b strategy=fsdp
    python scripts/slurm/submit.py slurm=cpu slurm.array=0-4 experiment=digits
    python scripts/slurm/submit.py slurm=gpu slurm.tasks_per_node=1 strategy=fsdp --dry-run

The batch script is train.sbatch with these values. Mistakes in them or in an override are reported
before submission.
"""

import argparse
import difflib
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from omegaconf import DictConfig, OmegaConf

from armature import cli
from armature.errors import ConfigError

HERE = Path(__file__).resolve().parent
TEXT = ("time", "partition", "account", "qos", "array")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the script and submit nothing"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="slurm=NAME, slurm.KEY=VALUE, and train.py's own",
    )
    args = parser.parse_intermixed_args()
    try:
        script = prepare(args.overrides)
    except ConfigError as error:
        cli.refuse(error.problems)
    if args.dry_run:
        print(script, end="")
        return
    try:
        result = subprocess.run(["sbatch", f"--chdir={ROOT}"], input=script, text=True)
    except FileNotFoundError:
        cli.refuse(
            [
                "sbatch: no such program here. Submit from a machine of the cluster, or type "
                "--dry-run."
            ]
        )
    sys.exit(result.returncode)


def prepare(typed: list[str]) -> str:
    """Return the batch script.

    Raises:
        ConfigError: for a misspelt key, and for numbers of nodes and tasks that would wait for each
            other forever.
    """
    job = cluster([override for override in typed if re.match(r"slurm[.=]", override)])
    overrides = [override for override in typed if not re.match(r"slurm[.=]", override)]
    problems, project = (
        geometry_problems(job, dict(o.split("=", 1) for o in overrides if "=" in o)),
        "",
    )
    try:  # misspelt keys and options; checks that depend on the machine run with the job
        project = cli.compose(overrides).project.name
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return render(job, overrides, project=project)


def cluster(typed: list[str]) -> DictConfig:
    """Return the file that `slurm=` names, changed by every `slurm.KEY=VALUE`."""
    files = {file.stem: file for file in sorted((HERE / "clusters").glob("*.yaml"))}
    name = next((override[6:] for override in typed if override.startswith("slurm=")), None)
    if name not in files:
        what = (
            "type which cluster, as in slurm=gpu"
            if name is None
            else f"slurm={name}: there is no such cluster"
        )
        raise ConfigError(
            f"{what}. Options: {', '.join(files)} (the files in scripts/slurm/clusters/)."
        )
    job = OmegaConf.load(files[name])
    assert isinstance(job, DictConfig)
    problems = []
    for override in typed:
        key, _, value = override.removeprefix("slurm.").partition("=")
        if key in job:
            # text stays text: YAML reads 1:00:00 as a number of seconds
            parsed = (
                value
                if key in TEXT and value != "null"
                else OmegaConf.from_dotlist([f"value={value}"]).value
            )
            OmegaConf.update(job, key, parsed, merge=False)
        elif override.startswith("slurm."):
            near = difflib.get_close_matches(key, [str(key) for key in job], n=1, cutoff=0.5)
            hint = f" Did you mean 'slurm.{near[0]}'?" if near else ""
            problems.append(
                f"{override}: there is no key 'slurm.{key}'.{hint} Keys: "
                f"{', '.join(map(str, job))}."
            )
    for key in ("nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "warn_seconds"):
        optional = key in ("gpus_per_node", "cpus_per_task") and job[key] is None
        if not optional and not (type(job[key]) is int and 0 < job[key] <= 10**6):
            problems.append(
                f"slurm.{key}={job[key]}: must be a positive number, of at most a million."
            )
    for key in TEXT:
        if job[key] is not None and not re.fullmatch(r"[^\s\[\]{}]+", str(job[key])):
            problems.append(
                f"slurm.{key}={job[key]!r}: must be one word of sbatch's --{key}, or null."
            )
    options = job.options if OmegaConf.is_list(job.options) else [None]
    if not all(isinstance(each, str) and re.fullmatch(r"\S.*", each) for each in options):
        problems.append(
            f"slurm.options={job.options}: must be a list, as in [constraint=a100,mem=0]."
        )
    if problems:
        raise ConfigError(problems)
    return job


def geometry_problems(job: DictConfig, typed: dict[str, str]) -> list[str]:
    """Return settings that make ranks wait for others that are never started, or that fail after a
    requeue.
    """
    problems = []
    nodes, tasks, gpus = job.nodes, job.tasks_per_node, job.gpus_per_node
    if (asked := typed.get("trainer.num_nodes", str(nodes))) != str(nodes):
        problems.append(
            f"trainer.num_nodes={asked}, but slurm.nodes={nodes}. Type slurm.nodes={asked} alone."
        )
    devices = typed.get("trainer.devices", "auto")
    if tasks > 1 and devices not in ("auto", str(tasks)):
        problems.append(
            f"trainer.devices={devices}, but slurm.tasks_per_node={tasks}: srun would start "
            f"{tasks} ranks per node. "
            f"Type slurm.tasks_per_node={devices} alone, or slurm.tasks_per_node=1 to have the "
            f"agent start {devices}."
        )
    elif tasks > 1 and devices == "auto" and "trainer.devices" in typed:
        problems.append(
            f"trainer.devices=auto: with slurm.tasks_per_node={tasks} it is {tasks}. Leave it out."
        )
    ranks = tasks if tasks > 1 else int(devices) if devices.isdigit() else gpus or 1
    accelerator = typed.get("trainer.accelerator", "auto")
    if gpus is not None and ranks > gpus and accelerator != "cpu":
        problems.append(
            f"{ranks} ranks on each node, but slurm.gpus_per_node={gpus}. Type "
            f"slurm.gpus_per_node={ranks}."
        )
    if gpus is None and accelerator == "gpu":
        problems.append(
            "trainer.accelerator=gpu, but slurm.gpus_per_node=null. Type slurm.gpus_per_node=…."
        )
    if "launch.rdzv_endpoint" in typed:
        problems.append(
            "launch.rdzv_endpoint: under Slurm it is the job's first node. Leave it out."
        )
    if typed.get("resume") == "never":
        problems.append(
            "resume=never: the job would be refused when it is restarted. Type resume=auto."
        )
    if job.array is not None and "seed" in typed:
        problems.append(
            f"seed={typed['seed']}, but slurm.array={job.array} gives each task its seed. Leave "
            "seed out."
        )
    return problems


def render(job: DictConfig, overrides: list[str], *, project: str) -> str:
    """Return train.sbatch with the options of the job and the overrides as arguments."""
    options: dict[str, object] = {
        "job-name": project,
        "nodes": job.nodes,
        "ntasks-per-node": job.tasks_per_node,
        "time": job.time,
    }
    options |= {
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": job.cpus_per_task,
        "array": job.array,
    }
    options |= {"partition": job.partition, "account": job.account, "qos": job.qos}
    options |= {"signal": f"USR1@{job.warn_seconds}", "chdir": ROOT}
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    lines += [f"#SBATCH --{option}" for option in job.options]
    template = (HERE / "train.sbatch").read_text().splitlines()
    first = next(i for i, line in enumerate(template) if line.startswith("#SBATCH"))
    kept = [
        line
        for line in template[first:]
        if not re.match(rf"#SBATCH --({'|'.join(options)})=|# To the ranks", line)
    ]
    end = next(i for i, line in enumerate(kept) if not line.startswith("#"))
    arguments = ["", shlex.join(["set", "--", *overrides])]
    return "\n".join([*template[:1], *lines, *kept[:end], *arguments, *kept[end:]]) + "\n"


if __name__ == "__main__":
    main()
