"""Habits of several fields, and what modules ask for."""

from tests.lightning_habits.cells import SINGLE, STOCK, callback, regression
from tests.lightning_habits.runs import Habit

FIELDS = [
    Habit(name="enhancer", task="brought.Enhancer", data="brought.Recordings"),
    Habit(name="packed_batches", task="brought.ReadsPacked", data="brought.PackedBatches"),
    Habit(name="sparse_batches", task="brought.SparseGraphNet", data="brought.SparseBatches"),
    Habit(
        name="masked_by_collate",
        task="brought.MaskedLanguageModel",
        data="brought.MaskedBatches",
        random=True,
    ),
    Habit(
        name="masked_by_workers",
        task="brought.MaskedLanguageModel",
        data="brought.MaskedBatchesByWorkers",
        random=True,
    ),
    Habit(name="translator", task="brought.Translator", data="tokens"),
    Habit(
        name="translator_until_end",
        task="brought.Translator",
        data="tokens",
        overrides=("+task.until_end=true",),
    ),
    regression(  # rounding
        "force_field",
        "brought.ForceField",
        apart=("net.2.bias",),
        refused={"fsdp2": "gradient of a gradient"},
    ),
    regression("forces", "brought.Forces"),
    regression(
        "adapts_to_test",
        "brought.AdaptsToTest",
        refused={"fsdp2": "trains sharded weights within an"},
    ),
    regression("pruned", "brought.Pruned"),
    Habit(name="swav", task="brought_more.SwAV", data="views", sample=SINGLE),
    Habit(name="swav_queue", task="brought_more.SwAVWithQueue", data="views"),
    Habit(name="miner", task="brought_more.Miner", data="vectors"),
    Habit(
        name="miner_loose",
        task="brought_more.Miner",
        data="vectors",
        overrides=("+task.hangs=false",),
    ),
    Habit(name="arcface", task="brought_more.ArcFace", data="vectors"),
    regression("pgd", "brought_more.PGD"),
    regression("fgsm", "brought_more.FGSM"),
    regression("monte_carlo", "brought_more.MonteCarlo", random=True),
    regression("stays_in_training", "brought_more.StaysInTraining", data="plain.Vectors"),
    # each rank's ranges follow its own samples; under fsdp a save warns that rank 0's are kept
    regression("quantized", "brought_more.Quantized", random=True, layouts=("single", "ddp2")),
    regression("larc", "brought_more.Larc"),
    regression("asks_trainer", "brought_more.AsksTrainer"),
]
ASKED = [
    regression("steps_in_setup", "asked.StepsInSetup"),
    regression("sets_up_data", "asked.SetsUpData"),
    regression("sets_up_plain_data", "asked.SetsUpData", data="plain.Vectors"),
    regression(
        "summarized",
        "asked.Summarized",
        callback(f"{STOCK}.ModelSummary", max_depth=-1),
        sample=("fsdp2",),
    ),
    regression(
        "scripted_weights", "asked.ScriptedWeights", refused={"fsdp2": "script it afterwards"}
    ),
    regression(
        "summarized_by_dict",
        "asked.ExampleOfDict",
        callback(f"{STOCK}.RichModelSummary", max_depth=2),
    ),
    regression(
        "logs_graph",
        "asked.Summarized",
        "logger=tensorboard",
        "+logger.tensorboard.log_graph=true",
        sample=("fsdp2",),
    ),
    regression("logs_hparams", "asked.LogsHparams", "logger=tensorboard"),
    regression("reads_rates", "asked.ReadsRates", layouts=SINGLE),
    regression("nested_metrics", "asked.NestedMetrics", random=True),
    regression(
        "container", "asked.Container", "+task.hparams={lr:0.05,deep:[1,{a:2}]}", layouts=SINGLE
    ),
    regression(
        "namespace", "asked.OfNamespace", "+task.lr=0.05", "+task.names=[a,b]", layouts=SINGLE
    ),
    regression("with_function", "asked.WithFunction", layouts=SINGLE),
    regression("dataclass_module", "asked.DataClass", "+task.wide=8", layouts=SINGLE),
    regression(
        "other_batch_size",
        "asked.OtherBatchSize",
        "logger=csv",
        data="plain.Vectors",
        layouts=SINGLE,
    ),
    regression(
        "averaged_by_package",
        "asked.AveragedByPackage",
        refused={"fsdp2": "as it was before"},
        sample=("fsdp2",),
    ),
    regression(
        "averaged_late", "asked.AveragedLate", refused={"fsdp2": "which no checkpoint can hold"}
    ),
    regression("adds_loader", "asked.AddsLoader", data="plain.Vectors"),
    regression(
        "grad_by_hand",
        "manual.GradByHand",
        sample=("single", "fsdp2"),
        refused={
            "ddp2": "is not the same on all ranks",
            "fsdp2": "did not see the gradient of net.0.weight",
        },
    ),
    regression(
        "grad_of_weights",
        "manual.GradOfWeights",
        sample=("fsdp2",),
        refused={"ddp2": "is not the same on all ranks", "fsdp2": "Call self.manual_backward"},
    ),
    regression(
        "draws_net",
        "apart.DrawsNet",
        layouts=("fsdp2",),
        sample=("fsdp2",),
        refused={"fsdp2": "ranks that gather different ones"},
    ),
    regression(
        "our_names", "asked.HasOurNames", data="asked.HasOurNamesToo", layouts=SINGLE, sample=SINGLE
    ),
]
