"""Habits of packages: their averages, optimizers, tags on parameters, steps, samplers and
loaders.
"""

from tests.lightning_habits.cells import ALL, SINGLE, STOCK, callback, regression

WHOLE = ("single", "ddp2")  # under fsdp torch cannot compute their step, and the message says so
APART = dict.fromkeys(("ddp2", "fsdp2"), "other training data on")
SAMPLES_APART = dict.fromkeys(("ddp2", "fsdp2"), "other training samples on")
HELD_OUT_APART = dict.fromkeys(("ddp2", "fsdp2"), "other validation data on")
LEFT_OUT = dict.fromkeys(("ddp2", "fsdp2"), "Leave 1 of them out")

NOT_SHARDED = {"fsdp2": "needs the whole model on every rank"}

FURTHER = [
    regression("metric_in_loss", "steps.MetricInLoss", layouts=SINGLE),
    regression("reads_callback_metrics", "steps.ReadsCallbackMetrics", layouts=SINGLE),
    regression(
        "seeds_validation", "steps.SeedsValidation", "trainer.val_every_n_steps=4", layouts=SINGLE
    ),
    regression(
        "draws_at_start", "loaders.DrawsAtStart", data="loaders.NegativeData", layouts=SINGLE
    ),
    regression("counts_iterator", "state.CountsIterator", sample=("single",)),
    regression(
        "growing_data",
        "loaders.Labels",
        data="loaders.GrowingData",
        refused=dict.fromkeys(ALL, "are 32 now"),
    ),
    regression(
        "own_loader_class",
        data="loaders.OwnLoaderClass",
        refused=dict.fromkeys(ALL, "own __iter__ decides"),
    ),
    regression(
        "wrapped_loader",
        data="loaders.WrappedLoader",
        refused=dict.fromkeys(ALL, "return one torch"),
    ),
    regression("lists_of_indices", data="loaders.ListsOfIndices"),
    regression("out_of_order", data="loaders.OutOfOrder"),
    regression("with_replacement", data="loaders.WithReplacement"),
    regression(
        "own_distributed_sampler",
        data="loaders.OwnDistributedSampler",
        refused=APART,
        sample=("ddp2",),
    ),
    regression(
        "shuffled_by_rank", data="loaders.ShuffledByRank", refused=SAMPLES_APART, sample=("ddp2",)
    ),
    regression("node_stream", data="loaders.NodeStream", refused=SAMPLES_APART),
    regression(
        "node_stream_held_out",
        data="loaders.NodeStreamHeldOut",
        refused=dict.fromkeys(("ddp2", "fsdp2"), "other validation samples on"),
    ),
    regression(
        "shard_held_out",
        "regression.TwoLoaders",
        data="loaders.ShardHeldOut",
        refused=HELD_OUT_APART,
        sample=("ddp2",),
    ),
    regression(
        "shard_test",
        "regression.Regressor",
        "trainer.test_at_end=true",
        data="loaders.ShardTest",
        refused=dict.fromkeys(("ddp2", "fsdp2"), "other test data on"),
    ),
    regression("one_by_one", data="loaders.OneByOne", refused=LEFT_OUT),
    regression("shuffled_stream", data="loaders.ShuffledStream"),
    regression("episodes", data="loaders.EpisodeData"),
    regression("ema_pytorch", "packages.AveragedByEma"),
    regression(
        "ema_timm", "packages.AveragedByTimm", refused={"ddp2": "is not the same on all ranks"}
    ),
    regression(
        "ema_nemo",
        "regression.Regressor",
        callback("tests.lightning_habits.packages.NemoEMA"),
        layouts=WHOLE,
    ),
    regression(
        "looks_ahead",
        "packages.LooksAhead",
        refused={"fsdp2": "needs the whole model on every rank"},
        sample=("single",),
    ),
    regression("step_hooks", "packages.StepHooks"),
    regression("tensor_rate", "packages.TensorRate"),
    regression("own_muon", "packages.Muons", layouts=WHOLE),
    regression("prodigy", "packages.Prodigies", layouts=WHOLE),
    regression("on_sphere", "packages.OnSphere"),
    regression("tagged", "packages.Tagged", sample=("fsdp2",)),
    regression("histograms", "steps.Histograms", layouts=WHOLE),  # NumPy reads no sharded tensor
    regression(
        "steps_in_backward",
        "packages.StepsInBackward",
        refused={"ddp2": "is not the same on all ranks"},
    ),
    regression("orthogonal_penalty", "steps.Orthogonal"),
    regression("penalty_first", "steps.PenaltyFirst", sample=("fsdp2",)),
    regression("anchored", "steps.Anchored", sample=("fsdp2",)),
    regression("calls_forward", "steps.CallsForward", apart=("net.2.bias",)),
    regression("partial_steps", "steps.PartialSteps", "trainer.test_at_end=true"),
    regression("decorated_steps", "steps.DecoratedSteps"),
    regression("parent", "steps.Parent"),
    regression("chosen_manual", "steps.ChosenManual"),
    regression(
        "chosen_automatic", "steps.ChosenManual", "+task.manual=false", "data.micro_batch_size=2"
    ),
    regression("sharded_hook", "steps.Sharded"),
    regression(
        "fine_schedules",
        "steps.FineSchedules",
        callback(f"{STOCK}.LearningRateMonitor", log_momentum="true"),
    ),
    regression("old_spectral", "steps.OldSpectral"),
    regression("cached_parametrization", "steps.CachedParametrization"),
    regression("token_means", "steps.TokenMeans"),
    regression("steps_another", "optimizers.StepsAnother", refused=NOT_SHARDED, sample=("single",)),
    regression("delegates", "optimizers.Delegates", refused=NOT_SHARDED, sample=("single",)),
    regression("keeps_lists", "optimizers.KeepsLists", sample=("single", "fsdp2")),
    regression("counts_steps", "optimizers.Counts", refused=NOT_SHARDED, sample=("single",)),
    regression("numpy_rate", "optimizers.NumpyRate", sample=("single",)),
    regression("warms_up", "optimizers.WarmsUp", sample=("single",)),
    regression("averages_after_steps", "optimizers.AveragesAfterSteps", sample=("single",)),
    regression(
        "loose_tensor",
        "optimizers.StepsLooseTensor",
        refused=dict.fromkeys(ALL, "is no parameter of the"),
    ),
]
