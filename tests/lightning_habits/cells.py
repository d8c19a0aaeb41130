"""What the lists of habits share."""

from tests.lightning_habits.runs import Habit

SINGLE = ("single",)
ALL = ("single", "ddp2", "fsdp2")
FIND_UNUSED = {"ddp2": ("strategy.find_unused_parameters=true",)}
NO_CLIP = "trainer.gradient_clip_val=null"
CALLBACKS = "tests.lightning_habits.callbacks"
STOCK = "lightning.pytorch.callbacks"


def callback(target: str, **arguments: object) -> str:
    given = "".join(f",{key}:{value}" for key, value in arguments.items())
    return f"+callbacks.{target.rpartition('.')[2].lower()}={{_target_:{target}{given}}}"


def regression(name: str, task: str = "regression.Regressor", *overrides: str, **settings) -> Habit:
    return Habit(name=name, task=task, overrides=overrides, **{"data": "regression", **settings})
