"""Habits of research code, of ranks apart, and of data with a memory."""

from tests.lightning_habits.cells import ALL, NO_CLIP, SINGLE, regression
from tests.lightning_habits.field import ASKED, FIELDS
from tests.lightning_habits.runs import Habit

BEFORE_NORM = ("net.0.bias",)  # a bias before BatchNorm has no gradient but rounding
WHOLE = (
    "single",
    "ddp2",
)  # under fsdp torch cannot do it, or a save warns that buffers of rank 0 are kept
AFTER = {"fsdp2": "after the model's forward, which has"}
KEPT = {"fsdp2": "is net.0.weight as it was before"}
LOST = {"fsdp2": "forward changes weights"}
UNEQUAL = "is not the same on all ranks"
STEPS = "the number of steps of SGD is not the same"
RATE = dict.fromkeys(("ddp2", "fsdp2"), "the learning rate of SGD is not the same")
UNEQUAL_EVERYWHERE = {"ddp2": UNEQUAL, "fsdp2": UNEQUAL}

RESEARCH = [
    regression("actnorm", "research.Glow", refused=LOST),
    regression("actnorm_inside", "research.GlowInside", refused=LOST),
    regression(
        "actnorm_local",
        "research.Glow",
        "+task.everywhere=false",
        refused={"ddp2": UNEQUAL, **LOST},
    ),
    regression(
        "langevin", "research.Langevin", random=True, refused={"ddp2": UNEQUAL}, sample=("ddp2",)
    ),
    regression("drawn_at_start", "research.DrawnAtStart", random=True),
    regression("drawn_at_train_start", "research.DrawnAtTrainStart", layouts=WHOLE),
    regression("dual_ascent", "research.DualAscent", refused=UNEQUAL_EVERYWHERE),
    regression("revives_units", "research.RevivesUnits", random=True, refused={"ddp2": UNEQUAL}),
    regression("begins_for_validation", "beginnings.BeginsForValidation", random=True),
    regression("kmeans_at_start", "research.KMeansAtStart"),
    regression("codebook", "research.Codebook", random=True, layouts=WHOLE),
    regression(
        "codebook_weight", "research.Codebook", "+task.weight=true", refused=UNEQUAL_EVERYWHERE
    ),
    regression("adaptive_weight", "research.AdaptiveWeight", random=True),
    regression("adversary", "research.Adversary"),
    regression("adaptive_clipping", "research.AdaptiveClipping"),
    regression("ensemble", "research.Ensemble"),
    regression("lazy_penalty", "research.LazyPenalty", NO_CLIP, layouts=WHOLE),
    regression("mixed_types", "weights.MixedTypes"),
    regression("odd_parameters", "weights.OddParameters"),
    regression("materialized", "weights.Materialized"),
    regression("materialized_in_setup", "weights.MaterializedInSetup"),
    regression("selective_checkpointing", "weights.RecomputesSelectively", sample=("fsdp2",)),
    regression("sets_rows", "weights.SetsRows", sample=("fsdp2",)),
    regression("sets_columns", "weights.SetsColumns"),
    regression("zeroes_row", "weights.ZeroesRow", refused={"fsdp2": "were changed in place"}),
    regression("scales_rows", "weights.ScalesRows", refused={"fsdp2": "were changed in place"}),
    regression(
        "zeroes_gradients", "weights.ZeroesGradients", refused={"fsdp2": "were changed in place"}
    ),
    regression(
        "zeroes_diagonal", "weights.ZeroesDiagonal", refused={"fsdp2": "were changed in place"}
    ),
    # under fsdp an error of torch's: tests/strategies/test_remedies.py
    regression("fills_diagonal", "weights.ZeroesDiagonal", "+task.way=fill", layouts=WHOLE),
    regression(
        "zeroes_splits",
        "weights.ZeroesDiagonal",
        "+task.way=split",
        refused={"fsdp2": "were changed in place"},
    ),
    regression("clamps_after", "weights.ClampsAfterForward", refused=AFTER, sample=("fsdp2",)),
    regression("clamps_data_after", "weights.ClampsAfterForward", "+task.way=data", refused=AFTER),
    regression("keeps_partial", "weights.KeepsPartial", refused=KEPT),
    regression("keeps_closure", "weights.KeepsPartial", "+task.way=closure", refused=KEPT),
    regression("tied_by_data", "weights.TiedByData", refused={"fsdp2": "share their memory"}),
    regression("endless_sampler", data="loaders.EndlessData", sample=SINGLE),
    regression("shadow_buffers", "weights.ShadowBuffers", layouts=WHOLE),
    regression("schedules_free", "weights.SchedulesFree"),
    regression("swaps_average", "weights.SwapsAverage", sample=("single", "fsdp2")),
]
APART = [
    regression("logs_by_data", "apart.LogsByData"),
    regression("logs_names_by_data", "apart.LogsNamesByData", sample=("ddp2",)),
    regression("metric_by_data", "apart.MetricByData", random=True),
    regression("metric_updated_by_data", "apart.MetricUpdatedByData"),
    regression("samples_on_rank_zero", "apart.SamplesOnRankZero", layouts=WHOLE),
    regression(
        "skips_by_data",
        "apart.SkipsByData",
        refused=dict.fromkeys(("ddp2", "fsdp2"), "returns -1 on rank"),
    ),
    regression("stops_by_data", "apart.StopsByData", stop=3),
    regression(
        "steps_by_data",
        "apart.StepsByData",
        sample=("fsdp2",),
        refused={"ddp2": STEPS, "fsdp2": "optimizer_step makes the step on 1 of 2 ranks"},
    ),
    regression("plateau_by_hand", "apart.PlateauByHand", refused=RATE, sample=("fsdp2",)),
    regression(
        "schedules_by_own_value", "apart.SchedulesByOwnValue", refused=RATE, sample=("fsdp2",)
    ),
    Habit(
        name="steps_by_accuracy",
        task="apart.StepsByAccuracy",
        data="images",
        sample=("fsdp2",),
        refused=dict.fromkeys(
            ("ddp2", "fsdp2"), "the number of steps of Adam (optimizer 2 of 2) is not the same"
        ),
    ),
    regression("local_buffer", "apart.LocalBuffer", random=True, layouts=WHOLE),
    regression("local_buffer_inside", "apart.LocalBufferInside", random=True, layouts=WHOLE),
]
STREAMS = [
    regression(
        "stateful_sampler",
        data="streams.StatefulSampler",
        layouts=SINGLE,
        refused=dict.fromkeys(ALL, "draws other samples the second time"),
    ),
    regression(
        "counting_sampler",
        data="streams.CountingSampler",
        layouts=SINGLE,
        refused=dict.fromkeys(ALL, "draws other samples the second time"),
    ),
    regression("set_epoch_sampler", data="streams.SetEpochSampler"),
    regression(
        "counting_stream",
        data="streams.CountingStream",
        layouts=SINGLE,
        refused=dict.fromkeys(ALL, "yields other samples when it is read again"),
    ),
    regression("replay", "streams.Replays", data="streams.Replay"),
    regression("replay_stream", "streams.Replays", data="streams.ReplayStream"),
    regression("hard_examples", "streams.SetsWeights", data="streams.HardExamples"),
    regression(
        "hard_examples_inside",
        "streams.SetsWeightsInside",
        data="streams.HardExamples",
        sample=("single", "ddp2"),
    ),
    regression(
        "hard_examples_apart",
        "streams.SetsOwnWeights",
        data="streams.HardExamples",
        sample=("ddp2",),
        refused=dict.fromkeys(("ddp2", "fsdp2"), "WeightedRandomSampler draws other samples on"),
    ),
    regression(
        "hard_examples_uneven", "streams.SetsWeightsInside", data="streams.UnevenHardExamples"
    ),
    regression("sampler_weights", "streams.SetsSamplerWeights", data="streams.HardExamples"),
    regression("loader_attributes", "streams.LoaderAttributes", data="plain.Vectors"),
]
OPTIMIZERS = [
    regression("schedules_decay", "optimizers.SchedulesDecay"),
    regression("names_groups", "optimizers.NamesGroups"),
    regression("freezes_backbone", "optimizers.FreezesBackbone"),
    regression("sets_rate_at_start", "optimizers.SetsRateAtStart", sample=SINGLE),
    regression("begins_optimizer_anew", "optimizers.BeginsOptimizerAnew"),
    regression(
        "replaces_head", "optimizers.ReplacesHead", random=True, layouts=SINGLE, sample=SINGLE
    ),
    regression("has_no_rate", "optimizers.HasNoRate", "+task.settings={}"),
    regression(
        "rate_is_none", "optimizers.HasNoRate", "+task.settings={lr:null}", sample=("ddp2",)
    ),
]
TWINS = [
    regression("other_name", "twins.OtherName", data="twins.Folds", sample=("fsdp2",)),
    regression("plain_norms", "twins.PlainNorms", apart=BEFORE_NORM, sample=("fsdp2",)),
    regression(
        "frozen_norms",
        "twins.PlainNorms",
        "+task.freezes=true",
        apart=BEFORE_NORM,
        sample=("ddp2",),
    ),
]
NEWEST = [*TWINS, *RESEARCH, *APART, *STREAMS, *FIELDS, *ASKED, *OPTIMIZERS]
