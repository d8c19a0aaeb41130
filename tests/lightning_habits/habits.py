"""The list of habits. `python -m tests.lightning_habits.habits` prints it."""

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
from tests.lightning_habits.further import FURTHER
from tests.lightning_habits.more import MORE
from tests.lightning_habits.newest import NEWEST
from tests.lightning_habits.runs import Habit

AFTER_BATCHNORM = (
    "running_mean",
    "val/loss",
    "val/acc",
    "val/acc_best",
)  # biases before BatchNorm, under Adam
NEEDS_WHOLE = {"Adafactor": {"fsdp2": "needs the whole model on every rank"}}

ADVERSARIAL = [
    Habit(name="gan", task="generative.GAN", data="images", overrides=(NO_CLIP,), sample=ALL),
    Habit(name="gan_clip_default", task="generative.GAN", data="images"),
    Habit(
        name="gan_untoggled", task="generative.UntoggledGAN", data="images", overrides=(NO_CLIP,)
    ),
    Habit(
        name="gan_schedules",
        task="generative.ScheduledGAN",
        data="images",
        overrides=(NO_CLIP,),
        sample=SINGLE,
    ),
    Habit(name="wgan", task="generative.WGAN", data="images", overrides=(NO_CLIP,)),
    Habit(
        name="wgan_inner",
        task="generative.InnerCritic",
        data="images",
        overrides=(NO_CLIP,),
        apart=("c_loss",),
    ),
    Habit(name="vae", task="generative.VAE", data="images", overrides=("+task.beta=0.5",)),
    Habit(
        name="vae_noise",
        task="generative.VAE",
        data="images",
        overrides=("+task.noise=true",),
        random=True,
    ),
    Habit(
        name="autoencoder", task="generative.LitAutoEncoder", data="images", apart=("train_loss",)
    ),
]
VISION = [
    Habit(
        name="lht",
        task="vision.MNISTLitModule",
        data="images",
        apart=AFTER_BATCHNORM,
        sample=SINGLE,
    ),
    Habit(name="lht_hparams", task="vision.SavedFactories", data="images", apart=AFTER_BATCHNORM),
    Habit(name="unet", task="vision.UNet", data="masks", sample=("single", "fsdp2")),
    Habit(name="metric_collection", task="vision.MetricsNet", data="images"),
    Habit(name="metrics_by_hand", task="vision.ComputedByHand", data="images", sample=SINGLE),
    Habit(name="vit", task="vision.ViT", data="images", overrides=(NO_CLIP,), sample=("ddp2",)),
    Habit(name="vit_clip_default", task="vision.ViT", data="images"),
    Habit(name="gradient_checkpointing", task="vision.Checkpointed", data="images"),
    Habit(name="spectral_norm", task="vision.Normed", data="images"),
    Habit(
        name="augmented",
        task="vision.MetricsNet",
        data="images",
        overrides=("data._target_=tests.lightning_habits.data.AugmentedData",),
    ),
    Habit(
        name="accumulated",
        task="vision.MetricsNet",
        data="images",
        overrides=("data.micro_batch_size=2",),
        apart=("my_loss_step",),
    ),
]
CONTRASTIVE = [
    Habit(name="moco", task="contrastive.MoCo", data="views", sample=("ddp2",)),
    Habit(name="moco_in_place", task="contrastive.MoCoInPlace", data="views", sample=("fsdp2",)),
    Habit(name="moco_copy", task="contrastive.MoCoCopy", data="views"),
    Habit(name="simclr", task="contrastive.SimCLR", data="views", sample=("fsdp2",)),
    Habit(name="byol", task="contrastive.BYOL", data="views", sample=("ddp2",)),
    Habit(name="late_teacher", task="contrastive.LateTeacher", data="views", refused={}),
]
SEQUENCES = [
    Habit(name="lstm", task="sequences.LSTMClassifier", data="sequences"),
    Habit(name="lstm_packed", task="sequences.PackedLSTM", data="ragged", sample=("ddp2",)),
    Habit(name="graphs", task="sequences.GraphNet", data="graphs", sample=SINGLE),
    Habit(name="llama", task="sequences.LlamaModule", data="tokens", sample=("fsdp2",)),
    Habit(
        name="llama_late", task="sequences.LateLlama", data="tokens", apart=("train_ppl",)
    ),  # a mean of exp
    Habit(
        name="transformers_llama",
        task="sequences.TransformersLlama",
        data="tokens",
        needs="transformers",
    ),
]
REGRESSION = [
    regression("regressor", sample=SINGLE),
    regression("plateau", "regression.Plateau"),
    regression("plateau_frequency", "regression.FrequentPlateau"),
    regression("plateau_step", "regression.StepPlateau"),
    regression("one_cycle", "regression.OneCycle", sample=SINGLE),
    regression("cosine_epochs", "regression.CosineEpochs", sample=SINGLE),
    regression("sequential", "regression.Sequential"),
    regression("lambda", "regression.Lambda"),
    regression("own_warmup", "regression.OwnWarmup", sample=SINGLE),
    regression("skipped_updates", "regression.SkippedUpdates"),
    regression(
        "accumulates_by_hooks", "regression.AccumulatesByHooks", stop=8, sample=("single", "fsdp2")
    ),
    regression("two_schedules", "regression.TwoSchedules"),
    # its estimates of the curvature amplify rounding
    regression(
        "lbfgs",
        "regression.LBFGS",
        random=True,
        refused={"fsdp2": "needs the whole model on every rank"},
    ),
    regression("grad_norms", "regression.GradNorms"),
    regression("total_norm", "regression.TotalNorm"),
    regression("skips_steps", "regression.SkipsSteps", layouts=SINGLE),
    regression(
        "reductions", "regression.Reductions", apart=("mine_local",), sample=("single", "ddp2")
    ),
    regression("logs_doubles", "regression.LogsDoubles", sample=SINGLE),
    regression("collects_outputs", "regression.CollectsOutputs"),
    regression("collects_train_outputs", "regression.CollectsTrainOutputs", sample=("ddp2",)),
    regression(
        "two_loaders",
        "regression.TwoLoaders",
        "data._target_=tests.lightning_habits.data.TwoLoaders",
    ),
    regression("initialized_in_setup", "regression.InitializedInSetup", sample=SINGLE),
    regression("built_in_setup", "regression.BuiltInSetup"),
    regression("train_only", "regression.TrainOnly"),
    regression("test_at_end", "regression.Regressor", "trainer.test_at_end=true"),
    regression("no_test_step", "regression.TrainOnly", "trainer.test_at_end=true", sample=SINGLE),
    regression("frozen_backbone", "regression.FrozenBackbone"),
    regression("tied", "regression.Tied", refused={"fsdp2": "are one weight in two models"}),
    regression("draws", "regression.Draws", random=True, sample=SINGLE),
    regression("teacher_copy", "regression.TeacherCopy"),
    regression(
        "gradient_penalty", "regression.Penalty", refused={"fsdp2": "gradient of a gradient"}
    ),
    regression("manual", "regression.Manual", NO_CLIP, sample=SINGLE),
    regression("manual_clip_default", "regression.Manual"),
    regression("manual_accumulation", "regression.ManualAccumulation", NO_CLIP, sample=SINGLE),
    regression("manual_closure", "regression.ManualClosure", NO_CLIP),
    regression("manual_sometimes", "regression.SometimesSteps", NO_CLIP),
    regression("two_optimizers", "regression.TwoOptimizers", NO_CLIP),
    regression("validation_inside", "regression.Regressor", "trainer.val_every_n_steps=4"),
    regression(
        "value_clip",
        "regression.Regressor",
        "trainer.gradient_clip_algorithm=value",
        "trainer.gradient_clip_val=0.05",
    ),
]
STATE = [
    regression(
        "rich_hparams",
        "state.RichHparams",
        "+task.sizes=[16,8]",
        "+task.nested={a:{b:[1,2]},c:x}",
        sample=SINGLE,
    ),
    regression(
        "list_hparams",
        "state.ListHparams",
        "+task.sizes=[16,8]",
        "+task.options={deep:[1,{x:2}]}",
        sample=SINGLE,
    ),
    regression("numpy_state", "state.NumpyState", sample=SINGLE),
    regression("extra_buffers", "state.ExtraState"),
    regression("drops_on_save", "state.DropsOnSave"),
    regression("renames", "state.Renames", sample=("fsdp2",)),
    regression("reads_on_save", "state.Halves"),
    regression("saves_itself", "state.SavesItself", layouts=("single", "ddp2"), sample=SINGLE),
    regression(
        "saves_net", "state.SavesNet", refused={"fsdp2": "is sharded over ranks"}, sample=("fsdp2",)
    ),
    regression("saves_whole", "state.SavesWhole", sample=("fsdp2",)),
    regression("saves_checkpoint", "state.SavesCheckpoint", sample=SINGLE),
    regression("saves_weights_only", "state.SavesWeightsOnly"),
]
CALLED = [
    regression(
        "early_stopping_val",
        "regression.Regressor",
        callback(f"{STOCK}.EarlyStopping", monitor="val/loss", patience=1, mode="max"),
        "trainer.max_epochs=4",
    ),
    regression(
        "early_stopping_train",
        "regression.Regressor",
        callback(f"{STOCK}.EarlyStopping", monitor="train/loss", patience=1, mode="max"),
        "trainer.max_epochs=4",
        sample=SINGLE,
    ),
    regression(
        "early_stopping_own_column",
        "regression.TrainOnly",
        callback(f"{STOCK}.EarlyStopping", monitor="train/loss", patience=1, mode="max"),
        "trainer.max_epochs=4",
    ),
    regression(
        "lr_monitor",
        "regression.OneCycle",
        callback(f"{STOCK}.LearningRateMonitor", log_momentum="true"),
    ),
    regression(
        "model_checkpoint",
        "regression.Regressor",
        callback(f"{STOCK}.ModelCheckpoint", monitor="val/loss", save_top_k=2, save_last="true"),
        sample=SINGLE,
    ),
    regression(
        "model_checkpoint_steps",
        "regression.Regressor",
        callback(f"{STOCK}.ModelCheckpoint", every_n_train_steps=4, save_top_k=-1),
    ),
    regression(
        "swa",
        "regression.Regressor",
        callback(
            f"{STOCK}.StochasticWeightAveraging",
            swa_lrs=0.01,
            swa_epoch_start=1,
            annealing_epochs=2,
        ),
        refused={"fsdp2": "copies the whole model"},
        sample=SINGLE,
    ),
    regression(
        "stock_ema",
        "regression.Regressor",
        callback(f"{STOCK}.EMAWeightAveraging", decay=0.9),
        refused={"fsdp2": "copies the whole model"},
    ),
    regression("ema", "regression.Regressor", callback("armature.callbacks.ema.EMA", decay=0.9)),
    Habit(
        name="ema_batchnorm",
        task="vision.UNet",
        data="masks",
        overrides=(callback("armature.callbacks.ema.EMA", decay=0.9),),
    ),
    regression(
        "finetuning", "callbacks.Finetuned", callback(f"{CALLBACKS}.Unfreeze"), sample=SINGLE
    ),
    regression(
        "backbone_finetuning",
        "callbacks.Finetuned",
        callback(f"{STOCK}.BackboneFinetuning", unfreeze_backbone_at_epoch=1),
    ),
    regression("counts", "regression.Regressor", callback(f"{CALLBACKS}.Counts"), sample=SINGLE),
    regression(
        "own_ema",
        "regression.Regressor",
        callback(f"{CALLBACKS}.OwnEMA"),
        refused={"fsdp2": "is a torch.distributed.tensor.DTensor, which no checkpoint can hold"},
    ),
    regression("stops_by_hand", "regression.Regressor", callback(f"{CALLBACKS}.StopsByHand")),
    regression("lowers_rate", "regression.Regressor", callback(f"{CALLBACKS}.LowersRate")),
    regression("probe", "regression.Regressor", callback(f"{CALLBACKS}.Probe")),
    regression(
        "of_several_loaders",
        "regression.Regressor",
        callback(f"{CALLBACKS}.OfSeveralLoaders"),
        refused=dict.fromkeys(ALL, "there is one validation loader"),
        sample=SINGLE,
    ),
    regression(
        "of_two_loaders",
        "regression.TwoLoaders",
        callback(f"{CALLBACKS}.OfSeveralLoaders"),
        "data._target_=tests.lightning_habits.data.TwoLoaders",
    ),
    regression(
        "tests_several_loaders",
        "callbacks.TestsSeveralLoaders",
        "trainer.test_at_end=true",
        refused=dict.fromkeys(ALL, "there is one test loader"),
        sample=SINGLE,
    ),
    regression("copies_module", "regression.Regressor", callback(f"{CALLBACKS}.CopiesModule")),
    regression(
        "gradient_accumulation_scheduler",
        "regression.Regressor",
        callback(f"{STOCK}.GradientAccumulationScheduler", scheduling="{0:1,1:2}"),
        refused=dict.fromkeys(ALL, "does not work here"),
    ),
    regression(
        "rich_progress_bar",
        "regression.Regressor",
        callback(f"{STOCK}.RichProgressBar"),
        sample=("ddp2",),
    ),
    regression("reads_on_rank_0", "regression.ReadsOnRank0"),
    regression("flushes_metric", "regression.FlushesMetric"),
    regression("tqdm_progress_bar", "regression.Regressor", callback(f"{STOCK}.TQDMProgressBar")),
    regression("timer", "regression.Regressor", callback(f"{STOCK}.Timer")),
    regression(
        "model_pruning",
        "regression.Regressor",
        callback(f"{STOCK}.ModelPruning", pruning_fn="l1_unstructured", amount=0.2),
        refused=dict.fromkeys(ALL, "does not work here"),
    ),
    regression(
        "lr_finder",
        "regression.Regressor",
        callback(f"{STOCK}.LearningRateFinder", num_training_steps=5),
        refused=dict.fromkeys(ALL, "does not work here"),
        sample=SINGLE,
    ),
    regression(
        "batch_size_finder",
        "regression.Regressor",
        callback(f"{STOCK}.BatchSizeFinder"),
        refused=dict.fromkeys(ALL, "does not work here"),
    ),
    regression(
        "model_summary", "regression.Regressor", callback(f"{STOCK}.ModelSummary", max_depth=2)
    ),
]
DATA = [
    regression("plain", data="plain.Vectors"),
    regression("plain_unshuffled", data="plain.Unshuffled"),
    regression("plain_tensors", "regression.TrainOnly", data="plain.Tensors"),
    Habit(name="plain_ragged", task="sequences.PackedLSTM", data="plain.Ragged"),
    regression("plain_weighted", data="plain.Weighted"),
    regression("plain_subset", data="plain.Subset"),
    regression("plain_batch_sampler", data="plain.ByBatchSampler"),
    regression("plain_buckets", data="plain.ByBuckets"),
    regression("plain_iterable", data="plain.Streaming"),
    regression("plain_two_loaders", "regression.TwoLoaders", data="plain.TwoValidations"),
    regression("plain_state", data="plain.WithState"),
    regression("plain_template", data="plain.TemplateData"),
    regression(
        "plain_combined",
        "regression.SemiSupervised",
        data="plain.Combined",
        refused=dict.fromkeys(ALL, "returns a dict"),
    ),
    regression("plain_distributed", data="plain.Distributed"),
    regression(
        "plain_curriculum",
        data="plain.Curriculum",
        refused=dict.fromkeys(ALL, "set it in on_train_epoch_start"),
    ),
    regression(
        "plain_whole_batches", data="plain.OneByOne", refused=dict.fromkeys(ALL, "batch_size=None")
    ),
]
PARAMETERS = [
    regression("l1", "regression.L1"),
    regression("scalar_parameter", "regression.ScalarParameter"),
    regression("other_methods", "regression.OtherMethods"),
    regression("weight_outside", "regression.WeightOutside"),
    regression("unused", "regression.Unused", also=FIND_UNUSED),
    regression(
        "unused_as_it_is",
        "regression.Unused",
        layouts=("ddp2",),
        sample=("ddp2",),
        refused={"ddp2": "Type strategy.find_unused_parameters=true, or freeze them"},
    ),
    regression("sometimes_used", "regression.SometimesUsed", also=FIND_UNUSED),
    regression("lists", "regression.Lists"),
    regression("clamps_weights", "regression.ClampsWeights"),
    regression("changes_gradients", "regression.NoisyGradients"),
    regression("multihead", "regression.MultiHead"),
]
TRAINER = [
    regression("annealing", "regression.Annealing", sample=SINGLE),
    regression("skips_the_rest", "regression.SkipsTheRest"),
    regression("own_callbacks", "regression.OwnCallbacks"),
    regression(
        "own_loaders",
        "regression.OwnLoaders",
        refused=dict.fromkeys(ALL, "methods of its own for data"),
        sample=SINGLE,
    ),
    regression("collisions", "regression.Collisions", apart=("samples_module",)),
    regression("sometimes_logs", "regression.SometimesLogs", sample=SINGLE),
    regression("gathers_in_validation", "regression.GathersInValidation"),
    regression("seeds", "regression.Seeds"),
    regression("objects", "regression.Objects", data="objects"),
    regression("bf16", "regression.Regressor", "trainer.precision=bf16-mixed", random=True),
    regression(
        "float64",
        "regression.Regressor",
        "trainer.precision=64-true",
        sample=SINGLE,
        refused={"fsdp2": "64-true does not work with this strategy"},
    ),
    regression(
        "ends_inside_an_epoch",
        "regression.OneCycle",
        "trainer.max_epochs=null",
        "trainer.max_steps=15",
    ),
    Habit(name="auroc", task="vision.ListStates", data="images", apart=("train/mean_step",)),
    regression(
        "manual_micro_batches",
        "regression.Manual",
        NO_CLIP,
        "data.micro_batch_size=2",
        refused=dict.fromkeys(ALL, "optimizes manually"),
        sample=SINGLE,
    ),
    regression("sam", "regression.SAM", NO_CLIP),
]
OPTIMIZERS = [
    *(
        regression(
            name.lower(), "regression.Zoo", f"+task.kind={name}", refused=NEEDS_WHOLE.get(name, {})
        )
        for name in (
            "Adagrad",
            "Adadelta",
            "NAdam",
            "RAdam",
            "Rprop",
            "ASGD",
            "Adamax",
            "Adafactor",
        )
    ),
    *(
        regression(
            f"schedule_{name.lower()}",
            "regression.Zoo",
            "+task.kind=SGD",
            f"+task.schedule={name}",
            f"+task.options={{{options}}}",
        )
        for name, options in {
            "CosineAnnealingWarmRestarts": "T_0:4",
            "MultiStepLR": "milestones:[5,11]",
            "PolynomialLR": "total_iters:18",
        }.items()
    ),
    regression("cyclic", "regression.Cyclic"),
    regression("object_lambda", "regression.ObjectLambda"),
    regression("lookahead", "regression.Lookahead"),
    regression("named_groups", "regression.Named"),
]
IDIOMS = [
    regression("loader_length", "idioms.LoaderLength"),
    regression(
        "loader_length_accumulated",
        "idioms.LoaderLength",
        "data.micro_batch_size=2",
        sample=("ddp2",),
    ),
    regression("clips_itself", "idioms.ClipsItself"),
    regression(
        "not_yet",
        "idioms.NotYet",
        refused=dict.fromkeys(ALL, "take their shape from the first batch"),
    ),
]
HABITS = [
    *IDIOMS,
    *PARAMETERS,
    *TRAINER,
    *OPTIMIZERS,
    *ADVERSARIAL,
    *VISION,
    *CONTRASTIVE,
    *SEQUENCES,
    *REGRESSION,
    *STATE,
    *CALLED,
    *DATA,
    *MORE,
    *NEWEST,
    *FURTHER,
]

if __name__ == "__main__":
    for habit in HABITS:
        print(f"{habit.name:24} {habit.task:32} {habit.data}")
