"""Everything private of other libraries that we rely on, in one table: a new version that changes
it fails here first.

A row is (owner, name, parameters, file of ours). The owner is `module` or `module:Class`.
Parameters are compared if they are given; None stands for an attribute: of the module or class, or
one that the class's own code assigns.
"""

import ast
import functools
import importlib
import inspect
import operator
from importlib.metadata import version
from pathlib import Path

import pytest

from armature.training import restore_progress
from tests import needs
from tests.finetune import extras

SOURCE = Path(__file__).parents[1] / "src" / "armature"
LOOPS = "lightning.pytorch.loops"
CONNECTORS = "lightning.pytorch.trainer.connectors.logger_connector"
EPOCH = f"{LOOPS}.training_epoch_loop:_TrainingEpochLoop"
FIT = f"{LOOPS}.fit_loop:_FitLoop"
EVALUATION = f"{LOOPS}.evaluation_loop:_EvaluationLoop"
LOGGING = f"{CONNECTORS}.logger_connector:_LoggerConnector"
RESULTS = f"{CONNECTORS}.result:_ResultCollection"
SIGNALS = "lightning.pytorch.trainer.connectors.signal_connector:_SignalConnector"
MODULE = "lightning.pytorch.core.module:LightningModule"
LIGHTNINGS_DEEPSPEED = "lightning.pytorch.strategies:DeepSpeedStrategy"
CALLBACKS = "lightning.pytorch.callbacks"
CALL = "lightning.pytorch.trainer.call"
PRECISION = "lightning.pytorch.plugins.precision:Precision"
DCP = "torch.distributed.checkpoint"
FSDP = "torch.distributed.fsdp._fully_shard"
SCALER = "torch.amp.grad_scaler:GradScaler"

TABLE: list[tuple[str, str, tuple[str, ...] | None, str]] = [
    # ---------------------------------------------------------------- torch: communication
    (
        "torch.distributed.distributed_c10d",
        "_resolve_process_group",
        None,
        "planning/simulation/order.py",
    ),
    (
        "torch.distributed._functional_collectives",
        "all_to_all_single_autograd",
        ("self", "output_split_sizes", "input_split_sizes", "group", "tag"),
        "parallel/experts.py",
    ),
    ("torch._functorch.config", "activation_memory_budget", None, "parallel/blocks.py"),
    ("torch.distributed.fsdp:FSDPModule", "_get_fsdp_state", ("self",), "parallel/apply.py"),
    (f"{FSDP}._fsdp_state:FSDPState", "_lazy_init", ("self",), "parallel/apply.py"),
    ("torch.distributed.tensor:DTensor", "_op_dispatcher", None, "parallel/sharded.py"),
    (
        "torch.distributed.tensor:DTensor._op_dispatcher",
        "_custom_op_handlers",
        None,
        "parallel/sharded.py",
    ),
    ("torch.ops:aten", "_local_scalar_dense", None, "parallel/sharded.py"),
    (f"{FSDP}._fsdp_state:FSDPState", "_fsdp_param_group", None, "parallel/apply.py"),
    (
        "torch.distributed.tensor._dispatch:OpDispatcher",
        "_try_replicate_spec_for_scalar_tensor",
        ("self", "op_call", "tensor_arg", "compute_mesh"),
        "parallel/sharded.py",
    ),
    ("torch.autograd:Variable", "_execution_engine", None, "parallel/gradients.py"),
    (
        f"{FSDP}._fsdp_param_group:FSDPParamGroup",
        "_init_mp_dtypes",
        ("self",),
        "parallel/apply.py",
    ),
    ("torch.utils.checkpoint", "SAC_IGNORED_OPS", None, "parallel/blocks.py"),
    ("torch.ops:profiler", "_record_function_enter_new", None, "parallel/blocks.py"),
    ("torch.ops:profiler", "_record_function_exit", None, "parallel/blocks.py"),
    # ---------------------------------------------------------------- Lightning: loops
    (EPOCH, "__init__", ("self", "trainer", "min_steps", "max_steps"), "training/loops.py"),
    (EPOCH, "advance", ("self", "data_fetcher"), "training/loops.py"),
    (EPOCH, "on_advance_end", ("self", "data_fetcher"), "training/loops.py"),
    (
        EPOCH,
        "update_lr_schedulers",
        ("self", "interval", "update_plateau_schedulers"),
        "training/loops.py",
    ),
    (EPOCH, "reset_restart_stage", ("self",), "training/loops.py"),
    (EPOCH, "_on_before_fetch", ("self",), "training/loops.py"),
    (EPOCH, "_on_after_fetch", ("self",), "training/loops.py"),
    (EPOCH, "_should_accumulate", ("self",), "training/loops.py"),
    (EPOCH, "_should_check_val_fx", ("self", "data_fetcher"), "training/loops.py"),
    (EPOCH, "_accumulated_batches_reached", ("self",), "training/loops.py"),
    (EPOCH, "_num_ready_batches_reached", ("self",), "training/loops.py"),
    (EPOCH, "_save_loggers_on_train_batch_end", ("self",), "training/loops.py"),
    (EPOCH, "_skip_next_val", None, "training/loops.py"),
    (EPOCH, "_batches_that_stepped", None, "training/loops.py"),
    (EPOCH, "_is_training_done", None, "training/loops.py"),
    (EPOCH, "_restart_stage", None, "training/loops.py"),
    (EPOCH, "_results", None, "training/restore_progress.py"),
    *(
        (
            f"{CALLBACKS}.model_checkpoint:ModelCheckpoint",
            name,
            None,
            "training/restore_progress.py",
        )
        for name in restore_progress.OF_MODEL_CHECKPOINT
    ),
    (EPOCH, "batch_progress", None, "training/loops.py"),
    (EPOCH, "val_loop", None, "training/loops.py"),
    (f"{LOOPS}.training_epoch_loop:RestartStage", "RESTARTED_ON_LAST", None, "training/loops.py"),
    (
        f"{LOOPS}.training_epoch_loop:RestartStage",
        "RESTARTED_ON_TRAIN_BATCH_END",
        None,
        "training/loops.py",
    ),
    (FIT, "__init__", ("self", "trainer", "min_epochs", "max_epochs"), "training/loops.py"),
    (FIT, "setup_data", ("self",), "training/loops.py"),
    (FIT, "_iteration_based_training", ("self",), "training/loops.py"),
    (FIT, "on_advance_start", ("self",), "training/loops.py"),
    (FIT, "on_advance_end", ("self",), "training/loops.py"),
    (FIT, "epoch_loop", None, "training/loops.py"),
    (FIT, "epoch_progress", None, "training/loops.py"),
    (FIT, "_data_fetcher", None, "training/loops.py"),
    (FIT, "_restart_stage", None, "training/loops.py"),
    (FIT, "_last_train_dl_reload_epoch", None, "training/loops.py"),
    (f"{LOOPS}.fit_loop:RestartStage", "RESTARTED_MID_EPOCH", None, "training/loops.py"),
    (f"{LOOPS}.loop:_Loop", "_restarting", None, "training/loops.py"),
    (f"{LOOPS}.loop:_Loop", "restarting", None, "training/loops.py"),
    (EVALUATION, "_has_run", None, "training/loops.py"),
    (EVALUATION, "run", None, "training/loops.py"),
    # ---------------------------------------------------------------- Lightning: hooks
    (
        CALL,
        "_call_lightning_module_hook",
        ("trainer", "hook_name", "args", "pl_module", "kwargs"),
        "training/loops.py",
    ),
    (EPOCH, "_broadcast_sigterm_tensor", ("self",), "training/loops.py"),
    # ---------------------------------------------------------------- Lightning: trainer, logging,
    # strategies
    ("lightning.pytorch.trainer.trainer:Trainer", "_signal_connector", None, "training/trainer.py"),
    ("lightning.pytorch.trainer.trainer:Trainer", "_logger_connector", None, "training/trainer.py"),
    (
        "lightning.pytorch.trainer.trainer:Trainer",
        "_checkpoint_connector",
        None,
        "training/trainer.py",
    ),
    (
        "lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector",
        "_parse_ckpt_path",
        ("self", "state_fn", "ckpt_path", "model_provided", "model_connected"),
        "training/trainer.py",
    ),
    ("lightning.pytorch.trainer.trainer:Trainer", "_results", None, "training/trainer.py"),
    (
        "lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector",
        "restore_optimizers_and_schedulers",
        ("self",),
        "training/epoch_start.py",
    ),
    ("lightning.pytorch.trainer.trainer:Trainer", "received_sigterm", None, "training/trainer.py"),
    (LOGGING, "_logged_metrics", None, "training/trainer.py"),
    (LOGGING, "log_metrics", ("self", "metrics", "step"), "training/trainer.py"),
    (LOGGING, "_first_loop_iter", None, "training/loops.py"),
    (SIGNALS, "register_signal_handlers", ("self",), "training/trainer.py"),
    (SIGNALS, "teardown", ("self",), "training/trainer.py"),
    (f"{CONNECTORS}.result:_ResultMetric", "_update_count", None, "training/epoch_metrics.py"),
    (f"{CONNECTORS}.result:_ResultMetric", "_computed", None, "training/trainer.py"),
    ("torchmetrics:Metric", "_reductions", None, "training/epoch_metrics.py"),
    (
        RESULTS,
        "update_metrics",
        ("self", "key", "value", "batch_size"),
        "training/epoch_metrics.py",
    ),
    (f"{CONNECTORS}.result:_Metadata", "sync", None, "training/epoch_metrics.py"),
    (f"{CONNECTORS}.result:_ResultMetric", "_forward_cache", None, "training/epoch_metrics.py"),
    (PRECISION, "_after_closure", ("self", "model", "optimizer"), "strategies/gradients.py"),
    (
        PRECISION,
        "clip_gradients",
        ("self", "optimizer", "clip_val", "gradient_clip_algorithm"),
        "strategies/gradients.py",
    ),
    (
        "lightning.pytorch.strategies:DDPStrategy",
        "_register_ddp_hooks",
        ("self",),
        "planning/simulation/substitutes.py",
    ),
    (
        "lightning.pytorch.strategies:ModelParallelStrategy",
        "_setup_distributed",
        ("self",),
        "strategies/mesh.py",
    ),
    (
        "lightning.pytorch.strategies:ModelParallelStrategy",
        "_device_mesh",
        None,
        "strategies/mesh.py",
    ),
    (MODULE, "_device_mesh", None, "strategies/mesh.py"),
    (LIGHTNINGS_DEEPSPEED, "_init_deepspeed_distributed", ("self",), "strategies/deepspeed.py"),
    (LIGHTNINGS_DEEPSPEED, "_format_config", ("self",), "strategies/deepspeed.py"),
    (LIGHTNINGS_DEEPSPEED, "_init_optimizers", ("self",), "strategies/deepspeed.py"),
    # ---------------------------------------------------------------- torch
    ("torch", "_foreach_norm", None, "parallel/gradients.py"),
    ("torch", "_foreach_mul", None, "parallel/gradients.py"),
    ("torch", "_foreach_mul_", None, "parallel/gradients.py"),
    ("torch", "_amp_foreach_non_finite_check_and_unscale_", None, "parallel/scaler.py"),
    (
        SCALER,
        "_unscale_grads_",
        ("self", "optimizer", "inv_scale", "found_inf", "allow_fp16"),
        "parallel/scaler.py",
    ),
    (SCALER, "_per_optimizer_states", None, "parallel/scaler.py"),
    ("torch.distributed.distributed_c10d", "default_pg_timeout", None, "parallel/process_group.py"),
    ("torch.distributed.distributed_c10d", "_get_default_store", (), "parallel/process_group.py"),
    ("torch.distributed.device_mesh:DeviceMesh", "_flatten", None, "parallel/mesh.py"),
    ("torch.distributed.device_mesh:DeviceMesh", "_unflatten", None, "parallel/mesh.py"),
    ("torch.nn.modules.batchnorm", "_BatchNorm", None, "parallel/batchnorm.py"),
    ("torch.nn.modules._functions", "SyncBatchNorm", None, "parallel/batchnorm.py"),
    ("torch.nn:Module", "_modules", None, "parallel/pipeline.py"),
    ("torch.nn:Module", "_parameters", None, "parallel/split.py"),
    ("torch.nn:Module", "_buffers", None, "strategies/base.py"),
    ("torch.nn:Module", "_buffers", None, "checkpoint/state.py"),
    ("torch.nn:Module", "_non_persistent_buffers_set", None, "models/wrapped.py"),
    ("torch.nn:Module", "_forward_hooks", None, "finetune/lora.py"),
    ("torch.nn:Module", "_forward_pre_hooks", None, "finetune/lora.py"),
    ("torch:Tensor", "_backward_hooks", None, "parallel/units.py"),
    ("torch:Tensor", "_post_accumulate_grad_hooks", None, "parallel/units.py"),
    (
        "torch.nn.parallel:DistributedDataParallel",
        "_build_params_for_reducer",
        ("self",),
        "strategies/ddp.py",
    ),
    ("torch.distributed:Reducer", "_push_all_rebuilt_params", None, "strategies/ddp.py"),
    ("torch.distributed:Reducer", "_rebuild_buckets", None, "strategies/ddp.py"),
    (
        "lightning.pytorch.strategies:DDPStrategy",
        "_setup_model",
        ("self", "model"),
        "strategies/ddp.py",
    ),
    (
        "torch.nn.parallel:DistributedDataParallel",
        "_check_reducer_finalized",
        None,
        "strategies/ddp.py",
    ),
    ("torch._inductor.runtime.cache_dir_utils", "default_cache_dir", (), "parallel/blocks.py"),
    ("torch._inductor", "config", None, "models/decoder/documents.py"),
    ("torch._inductor.config", "_micro_pipeline_tp", None, "parallel/blocks.py"),
    ("torch.ops", "_c10d_functional", None, "parallel/functional.py"),
    ("torch.utils._pytree", "tree_leaves", ("tree", "is_leaf"), "data/loader.py"),
    ("torch.utils._pytree", "tree_map", None, "checkpoint/optimizers.py"),
    ("torch.utils._pytree", "tree_structure", None, "checkpoint/optimizers.py"),
    ("torch.utils.data:DataLoader", "_iterator", None, "data/loader.py"),
    ("torch.utils.data:DataLoader", "_dataset_kind", None, "data/loader.py"),
    ("torch.utils.data._utils", "worker", None, "data/iterable.py"),
    ("torch.utils.data._utils.worker", "_worker_info", None, "data/iterable.py"),
    ("torch.optim.lr_scheduler:LRScheduler", "_step_count", None, "optim/schedules.py"),
    ("torch.optim.lr_scheduler:LRScheduler", "_last_lr", None, "optim/schedules.py"),
    (f"{DCP}._fsspec_filesystem", "FsspecReader", None, "checkpoint/storage.py"),
    (f"{DCP}:DefaultSavePlanner", "_cached_plans_key", None, "checkpoint/writer.py"),
    (f"{DCP}.filesystem", "_StorageInfo", None, "checkpoint/storage.py"),
    (f"{DCP}.metadata", "_MEM_FORMAT_ENCODING", None, "checkpoint/storage.py"),
    ("torch.serialization", "_get_layout", None, "checkpoint/storage.py"),
    ("torch", "_C", None, "training/watchdog.py"),
    ("torch._C", "_distributed_c10d", None, "training/watchdog.py"),
    ("torch._C._distributed_c10d", "_dump_fr_trace_json", None, "training/watchdog.py"),
    # ---------------------------------------------------------------- Hydra, Python
    ("hydra._internal.hydra:Hydra", "get_mode", None, "cli.py"),
    ("hydra._internal.utils", "get_args_parser", (), "cli.py"),
    ("atexit", "_run_exitfuncs", None, "launcher/rank.py"),
    ("sys", "_current_frames", (), "doctor/session.py"),
]
TABLE += [  # ---------------------------------------------------------------- the simulator
    ("torch.distributed._tools", "fake_collectives", None, "planning/simulation/meter.py"),
    (
        "torch.distributed._tools.fake_collectives:CollectiveOp",
        "get_process_group",
        None,
        "planning/simulation/meter.py",
    ),
    ("torch.utils._python_dispatch", "TorchDispatchMode", None, "planning/simulation/meter.py"),
    ("torch.utils._python_dispatch", "_disable_current_modes", (), "planning/simulation/hooks.py"),
    ("torch._ops:OpOverload", "_overloadpacket", None, "planning/simulation/meter.py"),
    (
        "torch.ops:aten",
        "_scaled_dot_product_flash_attention_for_cpu",
        None,
        "planning/simulation/meter.py",
    ),
    (
        "torch.ops:aten",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        None,
        "planning/simulation/meter.py",
    ),
    ("torch:UntypedStorage", "_cdata", None, "planning/simulation/meter.py"),
    ("torch:UntypedStorage", "resize_", None, "planning/simulation/hooks.py"),
    ("torch.distributed.tensor:DTensor", "_local_tensor", None, "planning/simulation/meter.py"),
    ("torch", "_subclasses", None, "planning/simulation/meter.py"),
    ("torch", "_grouped_mm", None, "planning/simulation/meter.py"),
    ("torch._subclasses.fake_tensor", "FakeTensorMode", None, "planning/simulation/job.py"),
    (
        "lightning.pytorch.overrides.distributed",
        "_IndexBatchSamplerWrapper",
        ("batch_sampler",),
        "data/loader.py",
    ),
    (
        "torch.testing._internal.distributed.fake_pg",
        "FakeStore",
        None,
        "planning/simulation/job.py",
    ),
    ("torch.distributed._mesh_layout", "_MeshLayout", None, "planning/simulation/hooks.py"),
    (
        "torch.distributed._mesh_layout:_MeshLayout",
        "remap_to_tensor",
        None,
        "planning/simulation/hooks.py",
    ),
    ("torch.distributed.fsdp._fully_shard", "_fsdp_param", None, "planning/simulation/hooks.py"),
    (
        "torch.distributed.fsdp._fully_shard",
        "_fsdp_param_group",
        None,
        "planning/simulation/hooks.py",
    ),
    (
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "foreach_all_gather",
        None,
        "planning/simulation/hooks.py",
    ),
    (
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "foreach_reduce",
        None,
        "planning/simulation/hooks.py",
    ),
    (
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam",
        "init_all_gather_outputs",
        None,
        "planning/simulation/hooks.py",
    ),
    (
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup",
        "post_backward",
        None,
        "planning/simulation/hooks.py",
    ),
    (
        "torch.distributed.tensor._sharding_prop",
        "ShardingPropagator",
        None,
        "planning/simulation/hooks.py",
    ),
    (
        "torch.distributed.tensor._sharding_prop:ShardingPropagator",
        "_propagate_tensor_meta_non_cached",
        ("self", "op_schema"),
        "planning/simulation/hooks.py",
    ),
    ("torch._subclasses", "fake_impls", None, "planning/simulation/operators.py"),
    (
        "torch._subclasses.fake_impls",
        "op_implementations_dict",
        None,
        "planning/simulation/operators.py",
    ),
    ("torch._subclasses.fake_tensor", "FakeTensor", None, "planning/simulation/operators.py"),
    (
        "torch._subclasses.fake_tensor",
        "DataDependentOutputException",
        None,
        "planning/simulation/operators.py",
    ),
    (
        "torch._subclasses.fake_tensor",
        "DynamicOutputShapeException",
        None,
        "planning/simulation/operators.py",
    ),
    (
        "torch._subclasses.fake_tensor",
        "UnsupportedOperatorException",
        None,
        "planning/simulation/operators.py",
    ),
    (
        "torch.distributed.pipelining._utils",
        "_TensorMeta",
        None,
        "planning/simulation/substitutes.py",
    ),
    (
        "torch.distributed.pipelining.stage",
        "_StageForwardMeta",
        None,
        "planning/simulation/substitutes.py",
    ),
    (
        "torch.distributed.pipelining.stage",
        "_StageBackwardMeta",
        None,
        "planning/simulation/substitutes.py",
    ),
    (
        "torch.distributed.pipelining.stage:PipelineStage",
        "_inference_mode",
        None,
        "planning/simulation/substitutes.py",
    ),
    (
        "torch.distributed.pipelining.schedules:PipelineScheduleSingle",
        "_initialize_pipeline_distributed_state",
        None,
        "planning/simulation/substitutes.py",
    ),
    (
        "torch.distributed.pipelining.stage:PipelineStage",
        "_recv_meta",
        None,
        "planning/simulation/substitutes.py",
    ),
    (
        "torch.nn.parallel.distributed",
        "_verify_param_shape_across_processes",
        None,
        "planning/simulation/substitutes.py",
    ),
    (
        "torch.nn.parallel.distributed",
        "_sync_module_states",
        None,
        "planning/simulation/substitutes.py",
    ),
    (
        "torch.utils.data.dataloader",
        "_SingleProcessDataLoaderIter",
        None,
        "planning/simulation/substitutes.py",
    ),
    (
        "torch.utils.data.dataloader",
        "_BaseDataLoaderIter",
        None,
        "planning/simulation/substitutes.py",
    ),
    (
        "lightning.pytorch.trainer.connectors.data_connector",
        "_InfiniteBarrier",
        None,
        "planning/simulation/substitutes.py",
    ),
]
# of torch: where a name is not, another path is taken
FROM = {
    "_inference_mode": (2, 12),
    "_initialize_pipeline_distributed_state": (2, 15),
    "_recv_meta": (2, 12),
    "_StageBackwardMeta": (2, 12),
    "_StageForwardMeta": (2, 12),
    "_TensorMeta": (2, 12),
}
BEFORE = {"FsspecReader": (2, 15)}
DEEPSPEED = [
    (
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
        "_lazy_init_hp_params_optimizer_state",
        ("self",),
    ),
    (
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
        "_hp_optimizer_states_linked",
        None,
    ),
    (
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
        "single_partition_of_fp32_groups",
        None,
    ),
    (
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
        "fp32_partitioned_groups_flat",
        None,
    ),
    ("deepspeed.runtime.fp16.loss_scaler:LossScalerBase", "cur_scale", None),
    ("deepspeed.ops", "__compatible_ops__", None),
]
TRANSFORMERS = [  # models/huggingface/ and finetune/built.py
    ("transformers.modeling_utils:PreTrainedModel", "_no_split_modules"),
    ("transformers.modeling_utils:PreTrainedModel", "tp_plan"),
    ("transformers.modeling_utils:PreTrainedModel", "base_model_prefix"),
    ("transformers.masking_utils", "find_packed_sequence_indices"),
    ("transformers", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    ("transformers", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"),
]
OURS_OR_PYTHONS = {"_asdict", "_exit", "_getframe", "_target_"}


OPTUNA = [
    ("optuna.trial:FrozenTrial", "_trial_id", None)
]  # a trial of a search, opened by the rank that reports it


def check(owner: str, name: str, parameters: tuple[str, ...] | None, file: str) -> None:
    module, _, cls = owner.partition(":")
    library = module.split(".")[0]
    release = (
        ""
        if library in ("atexit", "sys")
        else f" {version({'hydra': 'hydra-core'}.get(library, library))}"
    )
    changed = f"{library}{release} changed {owner}.{name}: see {file}"
    try:
        holder = importlib.import_module(module)
        holder = operator.attrgetter(cls)(holder) if cls else holder
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{changed} ({error})")
    found = getattr(holder, name, None)
    if found is None and inspect.isclass(holder):
        code = "\n".join(map(_code, holder.__mro__))
        assert f"self.{name}" in code or f'"{name}"' in code or f"    {name}:" in code, changed
        return
    assert hasattr(holder, name), changed
    if parameters is not None:
        assert tuple(inspect.signature(found).parameters) == parameters, changed


@functools.cache
def _code(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # it is made by C or by a function
        return ""


@pytest.mark.parametrize(
    ("owner", "name", "parameters", "file"), TABLE, ids=lambda value: str(value)[-40:]
)
def test_a_private_name_is_as_we_know_it(owner, name, parameters, file):
    if FROM.get(name, (0,)) <= needs.TORCH < BEFORE.get(name, (3,)):
        check(owner, name, parameters, f"src/armature/{file}")
    assert name in (SOURCE / file).read_text() or name == "__init__", (
        f"{file} does not use {name} any more"
    )


@pytest.mark.parametrize(
    ("owner", "name", "parameters"), DEEPSPEED, ids=lambda value: str(value)[-40:]
)
def test_a_private_name_of_deepspeed_is_as_we_know_it(owner, name, parameters):
    pytest.importorskip("deepspeed", reason="DeepSpeed is installed on Linux only")
    check(owner, name, parameters, "src/armature/strategies/deepspeed.py")


@pytest.mark.parametrize(
    ("owner", "name", "parameters"), OPTUNA, ids=lambda value: str(value)[-40:]
)
def test_a_private_name_of_optuna_is_as_we_know_it(owner, name, parameters):
    pytest.importorskip("optuna")
    check(owner, name, parameters, "src/armature/sweeps/search.py")


@pytest.mark.slow
def test_names_of_transformers_are_as_we_know_them():
    needs.extra("transformers")
    code = (
        "import importlib, sys\n"
        f"for owner, name in {TRANSFORMERS!r}:\n"
        "    module, _, cls = owner.partition(':')\n"
        "    holder = importlib.import_module(module)\n"
        "    holder = getattr(holder, cls) if cls else holder\n"
        "    assert hasattr(holder, name), f'transformers changed {owner}.{name}: see "
        "src/armature/models/huggingface/'"
    )
    extras.command("-c", code)


def test_a_change_is_named():
    with pytest.raises(
        AssertionError, match=r"lightning 2\..* changed .*_FitLoop\._gone: see src/armature/x\.py"
    ):
        check(FIT, "_gone", None, "src/armature/x.py")
    with pytest.raises(AssertionError, match=r"changed .*advance: see"):
        check(EPOCH, "advance", ("self",), "src/armature/x.py")


def test_the_table_is_complete():
    used, ours = _private_names()
    known = {name for _, name, *_ in [*TABLE, *DEEPSPEED, *OPTUNA, *TRANSFORMERS]} | OURS_OR_PYTHONS
    imported = {f"{owner.replace(':', '.')}.{name}" for owner, name, *_ in TABLE}
    imported |= {owner.replace(":", ".") for owner, *_ in TABLE}
    missing = {
        name: files
        for name, files in used.items()
        if (name not in imported if "." in name else name not in known and name not in ours)
    }
    assert not missing, f"private names of others that {__name__}.TABLE lacks: {missing}"


def _private_names() -> tuple[dict[str, set[str]], set[str]]:
    """Return private names that our sources use or override, by file, and those that our sources
    define.
    """
    used: dict[str, set[str]] = {}
    ours: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(
                "armature"
            ):
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name for name in full if any(map(_is_private, name.split(".")))]
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                overrides = any(
                    "override" in ast.unparse(decorator) for decorator in node.decorator_list
                )
                names = [f"override {node.name}"] if overrides and _is_private(node.name) else []
                ours.add("" if overrides else node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                parts = [part for target in targets for part in ast.walk(target)]
                ours |= {p.id for p in parts if isinstance(p, ast.Name)}
                ours |= {
                    p.attr
                    for p in parts
                    if isinstance(p, ast.Attribute) and ast.unparse(p.value) == "self"
                }
            for name in names:
                if _is_private(name) or "." in name or " " in name:
                    used.setdefault(name.removeprefix("override "), set()).add(
                        str(file.relative_to(SOURCE))
                    )
    return used, ours


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
