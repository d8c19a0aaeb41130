"""More habits: manual optimization, layers, methods of papers, batches, hooks, checkpoints,
callbacks.
"""

from tests.lightning_habits.cells import (
    ALL,
    CALLBACKS,
    FIND_UNUSED,
    NO_CLIP,
    SINGLE,
    STOCK,
    callback,
    regression,
)
from tests.lightning_habits.runs import Habit

NOT_IN_INIT = dict.fromkeys(ALL, "follow from its value after __init__")
OPTIMIZER_INIT = (
    "+task.optimizer_init={class_path:torch.optim.SGD,init_args:{lr:0.05,momentum:0.9}}"
)
SCHEDULER_INIT = (
    "+task.lr_scheduler_init={class_path:torch.optim.lr_scheduler.StepLR,"
    "init_args:{step_size:1,gamma:0.5}}"
)

MANUAL = [
    regression("manual_frequencies", "manual.Frequencies", NO_CLIP),
    regression("manual_frequency_key", "manual.Frequency", NO_CLIP),
    regression("manual_toggle_model", "manual.Toggles", NO_CLIP),
    regression("manual_toggled_optimizer", "manual.TogglesByContext", NO_CLIP),
    regression("manual_sync_late", "manual.SyncsLate", NO_CLIP),
    regression("manual_backward_twice", "manual.BackwardTwice", NO_CLIP),
    regression("manual_plain_optimizer", "manual.PlainOptimizers", NO_CLIP),
    regression("no_optimizer", "manual.NoOptimizer", NO_CLIP),
    regression("no_optimizer_automatic", "manual.NoneAutomatic", sample=SINGLE),
    regression("manual_by_property", "manual.ByProperty", NO_CLIP),
    regression(
        "manual_in_setup", "manual.ManualInSetup", NO_CLIP, refused=NOT_IN_INIT, sample=SINGLE
    ),
    regression(
        "automatic_late", "manual.AutomaticLate", NO_CLIP, refused=NOT_IN_INIT, sample=SINGLE
    ),
    regression("manual_in_training", "manual.ManualInTraining", refused=NOT_IN_INIT),
    regression("loss_per_sample", "manual.LossPerSample", NO_CLIP, sample=SINGLE),
    regression("own_backward", "manual.OwnBackward", sample=("ddp2",)),
    regression(
        "loss_by_data", "manual.LossByData", NO_CLIP, apart=("train/loss",), sample=("ddp2",)
    ),
    regression(
        "manual_bf16", "manual.ManualBF16", NO_CLIP, "trainer.precision=bf16-mixed", random=True
    ),
    regression("multitask", "manual.Multitask", NO_CLIP),
    regression("steps_at_the_end", "manual.StepsAtTheEnd", NO_CLIP),
    regression("actor_critic", "manual.Actor", NO_CLIP),
]
NO_SPARSE = {"fsdp2": "gradients that cannot be sharded"}
LAYERS = [
    regression("old_weight_norm", "layers.OldWeightNorm", sample=SINGLE),
    regression("new_weight_norm", "layers.NewWeightNorm"),
    regression("parametrized", "layers.Parametrized"),
    regression("forward_hooks", "layers.Hooked"),
    regression("gradient_hooks", "layers.GradientHooks"),
    regression("parameter_hooks", "layers.ParameterHooks", sample=("fsdp2",)),
    regression("shared_block", "layers.Shared"),
    regression("late_buffers", "layers.LateBuffers"),
    regression("growing_buffer", "layers.GrowingBuffer", sample=SINGLE),
    regression("growing_buffer_loads", "layers.GrowingBufferLoads"),
    regression(
        "sparse_over_batches", "layers.SparseOverBatches", NO_CLIP, layouts=("single", "ddp2")
    ),
    regression("sparse", "layers.Sparse", NO_CLIP, refused=NO_SPARSE),
    regression(
        "sparse_automatic",
        "layers.SparseAutomatically",
        refused=NO_SPARSE,
        sample=("single", "ddp2"),
    ),
    regression(
        "factorized",
        "layers.Factorized",
        "trainer.gradient_clip_val=0.1",
        refused=NO_SPARSE,
        sample=SINGLE,
    ),
    regression("embeddings", "layers.Embeddings"),
    regression(
        "max_norm",
        "layers.MaxNorm",
        refused={"ddp2": "is not the same on all ranks", "fsdp2": "forward changes weights"},
    ),
    regression("averaged_model", "layers.Averaged", also=FIND_UNUSED),
    regression("swaps_weights", "layers.SwapsWeights"),
    regression("hidden_teacher", "layers.HiddenTeacher"),
    regression("compiled", "layers.Compiled", sample=("fsdp2",)),
    regression("compiled_wrapper", "layers.CompiledWrapper"),
    regression("transformer_encoder", "layers.Transformer"),
    regression("channels_last", "layers.ChannelsLast", apart=("net.2.bias",)),  # rounding: 1.3e-5
    regression("complex_weights", "layers.ComplexWeights", sample=SINGLE),
    regression("routed", "layers.Routed"),
    regression("torch_extra_state", "layers.ExtraStates"),
    regression("norms", "layers.BatchNorms"),
]
METHODS = [
    Habit(name="dino", task="methods.DINO", data="views"),
    Habit(name="clip", task="methods.CLIP", data="views"),
    Habit(name="clip_in_place", task="methods.CLIPInPlace", data="views"),
    Habit(name="vq_vae", task="methods.VQVAE", data="images"),
    regression("dqn", "methods.DQN", also=FIND_UNUSED),
    Habit(name="diffusion", task="methods.Diffusion", data="images", random=True),
    # each rank adapts to its own samples
    regression(
        "inner_loop",
        "methods.InnerLoop",
        random=True,
        refused={"fsdp2": "torch.func.functional_call"},
    ),
    regression("per_sample", "methods.PerSample", refused={"fsdp2": "torch.func.functional_call"}),
    regression(
        "physics", "methods.Physics", refused={"fsdp2": "gradient of a gradient"}, sample=("fsdp2",)
    ),
    regression("flow", "methods.Flow"),
    regression("distilled", "methods.Distilled"),
    Habit(name="centers", task="methods.Centers", data="images"),
    Habit(name="detector", task="methods.Detector", data="batches.Detections"),
    Habit(name="recurrent", task="methods.Recurrent", data="sequences", overrides=(NO_CLIP,)),
]
BATCHES = [
    regression("named_tuples", "batches.FromFields", data="batches.NamedTuples"),
    regression("typed_tuples", "batches.FromFields", data="batches.TypedTuples"),
    regression("dicts_with_none", "batches.FromDict", data="batches.Dicts"),
    regression("own_batch_class", "batches.FromFields", data="batches.OwnBatches"),
    regression("arrays", "batches.FromArrays", data="batches.ArrayData"),
    regression("joined", data="batches.Joined"),
    regression("stacked", data="batches.Stacked"),
    regression("getitems", data="batches.BatchGetter"),
    regression("augmented_globally", data="batches.Augmented"),
    regression("augmented_by_workers", data="batches.AugmentedByWorkers"),
    regression("seeded_loader", data="batches.SeededLoader"),
    regression("sharded_stream", data="batches.ShardedStream"),
    regression("sharded_by_workers", data="batches.ShardedByWorkers"),
    regression("chained", data="batches.Chained"),
    regression("named_validations", "regression.TwoLoaders", data="batches.NamedValidations"),
    regression("combined_validation", "regression.TwoLoaders", data="batches.CombinedValidation"),
    regression(
        "paired_validation",
        "batches.ReadsPairs",
        data="batches.PairedValidation",
        refused=dict.fromkeys(ALL, "returns a CombinedLoader"),
    ),
    regression(
        "combined_training",
        data="batches.CombinedTraining",
        refused=dict.fromkeys(ALL, "returns a CombinedLoader"),
    ),
    regression(
        "list_training", data="batches.ListTraining", refused=dict.fromkeys(ALL, "returns a list")
    ),
    regression("no_validation", data="batches.NoValidation"),
    regression("prepared", data="batches.Prepared"),
    regression("data_transfers", data="batches.Transfers"),
    regression("last_is_small", data="batches.LastIsSmall"),
    regression("module_transfers", "batches.ModuleTransfers", random=True),
    regression("takes_iterator", "batches.Iterator"),
    regression("keyword_steps", "batches.Keyword"),
    regression("loaders_only", data="batches.OfModule"),
]
SURFACE = [
    regression("own_schedule", "surface.OwnSchedule"),
    regression("timm_schedule", "surface.Timm"),
    regression("chained_schedules", "surface.ChainedSchedules"),
    regression("two_lambdas", "surface.TwoLambdas"),
    regression("optimizer_callable", "surface.ByClass", sample=SINGLE),
    regression("optimizer_init", "surface.ByInit", OPTIMIZER_INIT, SCHEDULER_INIT),
    regression("own_zero_grad", "surface.OwnZeroGrad"),
    regression("own_clipping", "surface.OwnClipping"),
    regression("own_clipping_by_value", "surface.OwnClippingByValue"),
    regression("skips_nan", "surface.SkipsNaN"),
    regression("adds_group", "surface.AddsGroup", sample=SINGLE),
    regression("unfreezes", "surface.Unfreezes"),
    regression("alternates", "surface.Alternates"),
    regression("alternates_unused", "surface.Alternates", also=FIND_UNUSED),
    regression("logs_everywhere", "surface.LogsEverywhere", apart=("val_batch",)),
    regression("collections", "surface.Collections"),
    regression("tracked", "surface.Tracked"),
    regression("local_values", "surface.LocalValues", apart=("one_rank",)),
    regression("printer", "surface.Printer"),
    regression("stops_itself", "surface.StopsItself"),
    regression("stops_after_validation", "surface.StopsAfterValidation"),
    regression(
        "returns_none",
        "surface.ReturnsNone",
        refused=dict.fromkeys(("ddp2", "fsdp2"), "Return a loss on every rank"),
    ),
    regression("skips_first", "surface.SkipsFirst"),
    regression("two_models", "surface.TwoModels", also=FIND_UNUSED),
    regression("late_model", "surface.LateModel"),
    regression("checks_setup", "surface.ChecksSetup"),
    regression("eval_in_training", "surface.EvalInTraining"),
    regression("stateful", "surface.Stateful"),
]
KEPT = [
    regression("own_state_dict", "state.OwnStateDict"),
    regression("own_loading", "state.OwnLoading"),
    regression("load_hooks", "state.LoadHooks"),
    regression("reads_optimizers", "state.SavesOptimizers"),
    regression("loads_pretrained", "state.LoadsPretrained"),
    regression("per_rank", "state.PerRank", random=True),
]
CALLED = [
    regression(
        "online_evaluator", "regression.Regressor", callback(f"{CALLBACKS}.OnlineEvaluator")
    ),
    regression("attached_probe", "callbacks.TrainsProbe", callback(f"{CALLBACKS}.AttachesProbe")),
    regression("callback_logs", "regression.Regressor", callback(f"{CALLBACKS}.LogsAll")),
    regression("callback_best", "regression.Regressor", callback(f"{CALLBACKS}.StepsPerSecond")),
    regression("changes_loss", "callbacks.Weighted", callback(f"{CALLBACKS}.ChangesLoss")),
    regression(
        "changes_in_hooks", "regression.Regressor", callback(f"{CALLBACKS}.GradientAccumulator")
    ),
    regression(
        "device_stats",
        "regression.Regressor",
        callback(f"{STOCK}.DeviceStatsMonitor", cpu_stats="true"),
        clock=("DeviceStatsMonitor.",),
    ),
    regression(
        "throughput",
        "regression.Regressor",
        "+callbacks.throughput={_target_:tests.lightning_habits.callbacks.throughput}",
        clock=("train/time", "train/batches", "train/samples", "train/device/", "validate/"),
    ),
    regression(
        "timer_short",
        "regression.Regressor",
        callback(f"{STOCK}.Timer", duration="'00:00:10:00'", interval="epoch"),
    ),
    regression("rich_model_summary", "regression.Regressor", callback(f"{STOCK}.RichModelSummary")),
    regression(
        "on_exception",
        "regression.Regressor",
        callback(f"{STOCK}.OnExceptionCheckpoint", dirpath="outputs"),
    ),
    regression(
        "lambda_callback",
        "regression.Regressor",
        "+callbacks.lambdas={_target_:lightning.pytorch.callbacks.LambdaCallback}",
    ),
    regression(
        "lr_monitor_epochs",
        "surface.TwoLambdas",
        callback(f"{STOCK}.LearningRateMonitor", logging_interval="epoch", log_weight_decay="true"),
    ),
    regression(
        "checkpoint_by_steps",
        "regression.Regressor",
        callback(
            f"{STOCK}.ModelCheckpoint", monitor="train/loss", every_n_train_steps=4, save_top_k=2
        ),
    ),
    regression(
        "checkpoint_counted",
        "regression.Regressor",
        callback(f"{CALLBACKS}.CountsSaved"),
        layouts=("single",),
    ),
    regression(
        "checkpoint_named",
        "regression.Regressor",
        callback(
            f"{STOCK}.ModelCheckpoint",
            monitor="val/loss",
            filename="'{epoch}-{val/loss:.2f}'",
            save_last="true",
            save_on_train_epoch_end="true",
            save_weights_only="true",
        ),
    ),
    regression(
        "checkpoint_by_time",
        "regression.Regressor",
        "+callbacks.timed={_target_:lightning.pytorch.callbacks.ModelCheckpoint,"
        "train_time_interval:{_target_:datetime.timedelta,minutes:30}}",
        "launch.allowed_packages=[armature,torch.nn,torch.optim,torchmetrics,lightning.pytorch,"
        "tests,builtins,datetime]",
    ),
    regression(
        "early_stopping_threshold",
        "regression.Regressor",
        callback(
            f"{STOCK}.EarlyStopping",
            monitor="train/loss",
            stopping_threshold=0.4,
            check_on_train_epoch_end="true",
        ),
        "trainer.max_epochs=4",
        stop=4,
    ),
    regression(
        "early_stopping_missing",
        "regression.Regressor",
        callback(f"{STOCK}.EarlyStopping", monitor="nothing", strict="false"),
    ),
]
LIMITS = [
    regression("limited_train", "regression.Regressor", "trainer.limit_train_batches=5"),
    regression("limited_share", "regression.Regressor", "trainer.limit_train_batches=0.7"),
    regression("no_val_batches", "regression.TrainOnly", "trainer.limit_val_batches=0"),
    regression("one_epoch", "regression.Regressor", "trainer.max_epochs=1", stop=3),
    regression("stop_at_end_of_epoch", "regression.Regressor", stop=12),
    regression("stop_after_first", "regression.OneCycle", stop=1),
    regression("stop_before_last", "regression.OneCycle", stop=17),
    regression("stop_at_last", "regression.OneCycle", stop=18, sample=SINGLE),
    regression(
        "stop_at_last_inside_epoch", "regression.Regressor", "trainer.max_steps=16", stop=16
    ),
    regression("true_bf16", "regression.Regressor", "trainer.precision=bf16-true", random=True),
    regression("deterministic", "regression.Regressor", "trainer.deterministic=true"),
    regression(
        "accumulated_plateau",
        "regression.StepPlateau",
        "data.micro_batch_size=2",
        apart=("step_loss",),
    ),
    regression(
        "accumulated_iterator",
        "batches.Iterator",
        "data.micro_batch_size=2",
        apart=("train/mse_step",),
    ),
    # the hook leaves the epoch at a micro-batch, of which a global batch has as many as its layout
    # makes
    regression(
        "accumulated_skips",
        "regression.SkipsTheRest",
        "data.micro_batch_size=2",
        layouts=("single",),
        stop=2,
    ),
    regression(
        "skips_within_a_step",
        "regression.SkipsWithinAStep",
        "data.micro_batch_size=2",
        "trainer.max_epochs=6",
        layouts=("single",),
    ),
    regression("accumulated_warmup", "regression.OwnWarmup", "data.micro_batch_size=2"),
    regression("accumulated_lists", "regression.CollectsTrainOutputs", "data.micro_batch_size=2"),
    Habit(
        name="accumulated_metrics",
        task="vision.ListStates",
        data="images",
        overrides=("data.micro_batch_size=2",),
        apart=("train/mean_step",),
    ),
]
RECIPES = [
    regression("logs_at_start", "recipes.LogsAtStart", sample=SINGLE),
    regression("logs_at_start_first_epoch", "recipes.LogsAtStart", stop=3),
    regression("logs_at_start_end_of_epoch", "recipes.LogsAtStart", stop=12),
    regression(
        "logs_at_start_accumulated",
        "recipes.LogsAtStart",
        "data.micro_batch_size=2",
        apart=("first",),
    ),
    Habit(name="confusion", task="recipes.Confusion", data="images"),
    Habit(
        name="byol_by_callback",
        task="recipes.ByolByCallback",
        data="views",
        overrides=("+callbacks.moves={_target_:tests.lightning_habits.recipes.MovesTarget}",),
        also=FIND_UNUSED,
    ),
    Habit(name="memory_bank", task="recipes.MemoryBank", data="views"),
    regression("ppo", "recipes.PPO", NO_CLIP),
    regression("manual_clips_by_torch", "recipes.ManualClipsByTorch", NO_CLIP),
    # both come close to 0
    regression("multitask_dict", "recipes.MultiTask", apart=("train/loss", "heads.sine.bias")),
    regression("freezes", "recipes.Freezes", sample=("ddp2",)),
    regression("freezes_by_batch", "recipes.FreezesByBatch"),
    regression(  # by layout, other samples are in the micro-batches that it counts
        "freezes_by_micro_batch", "recipes.FreezesByBatch", "data.micro_batch_size=2", random=True
    ),
    regression(
        "tied_across", "recipes.TiedAcross", refused={"fsdp2": "are one weight in two models"}
    ),
    regression("on_pretrained", "recipes.OnPretrained"),
    regression("injects_adapters", "recipes.InjectsAdapters"),
    regression(
        "late_parameter_hook",
        "recipes.LateParameterHook",
        refused={"fsdp2": "has a hook that"},
    ),
    regression("masks_rows", "recipes.MasksRows", sample=("fsdp2",)),
    regression("mixup", "recipes.Draws", random=True),
    regression(
        "keeps_best",
        "regression.Regressor",
        callback("tests.lightning_habits.recipes.KeepsBest"),
        refused={"fsdp2": "is a torch.distributed.tensor.DTensor, which no checkpoint can hold"},
    ),
    regression(
        "range_test", "regression.Regressor", callback("tests.lightning_habits.recipes.RangeTest")
    ),
    regression(
        "early_stopping_divergence",
        "regression.Regressor",
        callback(
            f"{STOCK}.EarlyStopping",
            monitor="val/loss",
            divergence_threshold=0.05,
            check_finite="true",
            patience=3,
        ),
        "trainer.max_epochs=4",
        stop=4,
    ),
    regression(
        "accumulated_grad_norms",
        "regression.GradNorms",
        "trainer.gradient_clip_val=0.1",
        "data.micro_batch_size=2",
    ),
]
BEGINNINGS = [
    regression(
        "by_epoch",
        "beginnings.ByEpoch",
        "data.num_workers=1",
        data="beginnings.Weighted",
        sample=SINGLE,
    ),
    regression("draws_per_epoch", "beginnings.DrawsPerEpoch", random=True, sample=SINGLE),
    regression("teacher_at_start", "beginnings.TeacherAtStart", sample=SINGLE),
    regression("weights_at_start", "weights.LoadsAtStart", sample=("fsdp2",)),
    regression(
        "bank",
        "beginnings.Bank",
        "data.num_workers=1",
        "trainer.val_every_n_steps=4",
        data="plain.Vectors",
    ),
]
MORE = [
    *BEGINNINGS,
    *MANUAL,
    *LAYERS,
    *METHODS,
    *BATCHES,
    *SURFACE,
    *KEPT,
    *CALLED,
    *LIMITS,
    *RECIPES,
]
