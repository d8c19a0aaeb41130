"""Everything private of other libraries that we rely on, in one table: a new version that changes
it fails here first.

A row is (owner, name), or (owner, name, parameters), which are then compared. The owner is `module`
or `module:Class`. The name is an attribute of it, or one that the class's own code assigns.
"""

import ast
import functools
import importlib
import inspect
import operator
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from armature.training import user_state
from tests import needs
from tests.finetune import extras

SOURCE = Path(__file__).parents[1] / "src" / "armature"
CALLBACKS = "lightning.pytorch.callbacks"
LOOPS = "lightning.pytorch.loops"
CONNECTORS = "lightning.pytorch.trainer.connectors.logger_connector"
EPOCH = f"{LOOPS}.training_epoch_loop:_TrainingEpochLoop"
FIT = f"{LOOPS}.fit_loop:_FitLoop"
EVALUATION = f"{LOOPS}.evaluation_loop:_EvaluationLoop"
LOGGING = f"{CONNECTORS}.logger_connector:_LoggerConnector"
SIGNALS = "lightning.pytorch.trainer.connectors.signal_connector:_SignalConnector"
MODULE = "lightning.pytorch.core.module:LightningModule"
LIGHTNINGS_DEEPSPEED = "lightning.pytorch.strategies:DeepSpeedStrategy"
PRECISION = "lightning.pytorch.plugins.precision:Precision"
DCP = "torch.distributed.checkpoint"
FSDP = "torch.distributed.fsdp._fully_shard"
ZERO = "deepspeed.runtime.zero"

TABLE: list[tuple[Any, ...]] = [
    # ---------------------------------------------------------------- torch: communication
    ("torch.distributed.distributed_c10d", "_resolve_process_group"),
    (
        "torch.distributed._functional_collectives",
        "all_to_all_single_autograd",
        ("self", "output_split_sizes", "input_split_sizes", "group", "tag"),
    ),
    ("torch._functorch.config", "activation_memory_budget"),
    ("torch.distributed.fsdp:FSDPModule", "_get_fsdp_state", ("self",)),
    (f"{FSDP}._fsdp_state:FSDPState", "_lazy_init", ("self",)),
    ("torch.distributed.tensor:DTensor", "_op_dispatcher"),
    ("torch.distributed.tensor:DTensor._op_dispatcher", "_custom_op_handlers"),
    ("torch.ops:aten", "_local_scalar_dense"),
    (f"{FSDP}._fsdp_state:FSDPState", "_fsdp_param_group"),
    (
        "torch.distributed.tensor._dispatch:OpDispatcher",
        "_try_replicate_spec_for_scalar_tensor",
        ("self", "op_call", "tensor_arg", "compute_mesh"),
    ),
    ("torch.autograd:Variable", "_execution_engine"),
    (f"{FSDP}._fsdp_param_group:FSDPParamGroup", "_init_mp_dtypes", ("self",)),
    ("torch.ops:profiler", "_record_function_enter_new"),
    ("torch.ops:profiler", "_record_function_exit"),
    # ---------------------------------------------------------------- Lightning: loops
    (EPOCH, "__init__", ("self", "trainer", "min_steps", "max_steps")),
    (EPOCH, "advance", ("self", "data_fetcher")),
    (EPOCH, "on_advance_end", ("self", "data_fetcher")),
    (EPOCH, "update_lr_schedulers", ("self", "interval", "update_plateau_schedulers")),
    (EPOCH, "_on_before_fetch", ("self",)),
    (EPOCH, "_on_after_fetch", ("self",)),
    (EPOCH, "_should_check_val_fx", ("self", "data_fetcher")),
    (EPOCH, "_batches_that_stepped"),
    (EPOCH, "_is_training_done"),
    (EPOCH, "_results"),
    *(
        (f"{CALLBACKS}.model_checkpoint:ModelCheckpoint", name)
        for name in user_state.OF_MODEL_CHECKPOINT
    ),
    (EPOCH, "batch_progress"),
    (EPOCH, "val_loop"),
    (FIT, "__init__", ("self", "trainer", "min_epochs", "max_epochs")),
    (FIT, "setup_data", ("self",)),
    (FIT, "_iteration_based_training", ("self",)),
    (FIT, "on_advance_start", ("self",)),
    (FIT, "on_advance_end", ("self",)),
    (FIT, "epoch_loop"),
    (FIT, "epoch_progress"),
    (FIT, "_data_fetcher"),
    (FIT, "update_restart_stage", ("self",)),
    (FIT, "_last_train_dl_reload_epoch"),
    (f"{LOOPS}.loop:_Loop", "_restarting"),
    (f"{LOOPS}.loop:_Loop", "restarting"),
    (EVALUATION, "_has_run"),
    (EVALUATION, "batch_progress"),
    (EVALUATION, "run"),
    # ---------------------------------------------------------------- Lightning: hooks
    (EPOCH, "_broadcast_sigterm_tensor", ("self",)),
    # ---------------------------------------------------------------- Lightning: trainer, logging,
    # strategies
    ("lightning.pytorch.trainer.trainer:Trainer", "_signal_connector"),
    ("lightning.pytorch.trainer.trainer:Trainer", "_logger_connector"),
    ("lightning.pytorch.trainer.trainer:Trainer", "_checkpoint_connector"),
    (
        "lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector",
        "_parse_ckpt_path",
        ("self", "state_fn", "ckpt_path", "model_provided", "model_connected"),
    ),
    (
        "lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector",
        "restore_optimizers_and_schedulers",
        ("self",),
    ),
    (LOGGING, "_logged_metrics"),
    (LOGGING, "log_metrics", ("self", "metrics", "step")),
    (LOGGING, "_first_loop_iter"),
    (SIGNALS, "register_signal_handlers", ("self",)),
    (SIGNALS, "teardown", ("self",)),
    ("torchmetrics:Metric", "_update_count"),
    (f"{CONNECTORS}.result:_ResultMetric", "_computed"),
    ("torchmetrics:Metric", "_reductions"),
    (f"{CONNECTORS}.result:_ResultCollection", "reset", ("self", "metrics", "fx")),
    (f"{CONNECTORS}.result:_Metadata", "sync"),
    (f"{CONNECTORS}.result:_ResultMetric", "_forward_cache"),
    (PRECISION, "_after_closure", ("self", "model", "optimizer")),
    ("lightning.pytorch.strategies:DDPStrategy", "_register_ddp_hooks", ("self",)),
    ("lightning.pytorch.strategies:ModelParallelStrategy", "_setup_distributed", ("self",)),
    ("lightning.pytorch.strategies:ModelParallelStrategy", "_device_mesh"),
    (MODULE, "_device_mesh"),
    (LIGHTNINGS_DEEPSPEED, "_init_deepspeed_distributed", ("self",)),
    (LIGHTNINGS_DEEPSPEED, "_format_config", ("self",)),
    (LIGHTNINGS_DEEPSPEED, "_init_optimizers", ("self",)),
    # ---------------------------------------------------------------- torch
    ("torch:Tensor", "_version"),
    ("torch:Tensor", "_base"),
    ("torch", "_foreach_norm"),
    ("torch", "_foreach_mul_"),
    ("torch.distributed.distributed_c10d", "default_pg_timeout"),
    ("torch.distributed.distributed_c10d", "_get_default_store", ()),
    ("torch.distributed.device_mesh:DeviceMesh", "_flatten"),
    ("torch.distributed.device_mesh:DeviceMesh", "_unflatten"),
    ("torch.nn.modules.batchnorm", "_BatchNorm"),
    ("torch.nn.modules._functions", "SyncBatchNorm"),
    ("torch.nn:Module", "_parameters"),
    ("torch.nn:Module", "_buffers"),
    ("torch.nn:Module", "_non_persistent_buffers_set"),
    ("torch:Tensor", "_backward_hooks"),
    ("torch:Tensor", "_post_accumulate_grad_hooks"),
    ("torch.nn.parallel:DistributedDataParallel", "_build_params_for_reducer", ("self",)),
    ("torch.distributed:Reducer", "_push_all_rebuilt_params"),
    ("torch.distributed:Reducer", "_rebuild_buckets"),
    ("lightning.pytorch.strategies:DDPStrategy", "_setup_model", ("self", "model")),
    ("torch.nn.parallel:DistributedDataParallel", "_check_reducer_finalized"),
    ("torch._inductor", "config"),
    ("torch._inductor.config", "_micro_pipeline_tp"),
    ("torch.ops", "_c10d_functional"),
    ("torch.utils._pytree", "tree_leaves", ("tree", "is_leaf")),
    ("torch.utils._pytree", "tree_map"),
    ("torch.utils.data:DataLoader", "_iterator"),
    ("torch.utils.data:DataLoader", "_dataset_kind"),
    ("torch.utils.data._utils", "worker"),
    ("torch.utils.data._utils.worker", "_worker_info"),
    ("torch.optim.lr_scheduler:LRScheduler", "_step_count"),
    ("torch.optim.lr_scheduler:LRScheduler", "_last_lr"),
    (f"{DCP}._fsspec_filesystem", "FsspecReader"),
    (f"{DCP}.filesystem", "_StorageInfo"),
    (f"{DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("torch", "_C"),
    ("torch._C", "_distributed_c10d"),
    ("torch._C._distributed_c10d", "_dump_fr_trace_json"),
    # ---------------------------------------------------------------- Hydra, Python
    ("hydra._internal.utils", "get_args_parser", ()),
    ("hydra._internal.utils", "argparse"),
    ("atexit", "_run_exitfuncs"),
    ("sys", "_current_frames", ()),
    # ---------------------------------------------------------------- the simulator
    ("torch.distributed._tools", "fake_collectives"),
    ("torch.utils._python_dispatch", "TorchDispatchMode"),
    ("torch.utils._python_dispatch", "_disable_current_modes", ()),
    ("torch._ops:OpOverload", "_overloadpacket"),
    ("torch.ops:aten", "_scaled_dot_product_flash_attention_for_cpu"),
    ("torch.ops:aten", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    ("torch:UntypedStorage", "_cdata"),
    ("torch:UntypedStorage", "resize_"),
    ("torch.distributed.tensor:DTensor", "_local_tensor"),
    ("torch", "_subclasses"),
    ("torch", "_grouped_mm"),
    ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    ("lightning.pytorch.overrides.distributed", "_IndexBatchSamplerWrapper", ("batch_sampler",)),
    ("torch.testing._internal.distributed.fake_pg", "FakeStore"),
    ("torch.distributed._mesh_layout", "_MeshLayout"),
    ("torch.distributed._mesh_layout:_MeshLayout", "remap_to_tensor"),
    ("torch.distributed.fsdp._fully_shard", "_fsdp_param"),
    ("torch.distributed.fsdp._fully_shard", "_fsdp_param_group"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "foreach_all_gather"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "foreach_reduce"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam", "init_all_gather_outputs"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup", "post_backward"),
    ("torch.distributed.tensor._sharding_prop", "ShardingPropagator"),
    (
        "torch.distributed.tensor._sharding_prop:ShardingPropagator",
        "_propagate_tensor_meta_non_cached",
        ("self", "op_schema"),
    ),
    ("torch._subclasses", "fake_impls"),
    ("torch._subclasses.fake_impls", "op_implementations_dict"),
    ("torch._subclasses.fake_tensor", "FakeTensor"),
    ("torch.distributed.pipelining._utils", "_TensorMeta"),
    ("torch.distributed.pipelining.stage", "_StageForwardMeta"),
    ("torch.distributed.pipelining.stage", "_StageBackwardMeta"),
    ("torch.distributed.pipelining.stage:PipelineStage", "_inference_mode"),
    (
        "torch.distributed.pipelining.schedules:PipelineScheduleSingle",
        "_initialize_pipeline_distributed_state",
    ),
    ("torch.distributed.pipelining.stage:PipelineStage", "_recv_meta"),
    ("torch.nn.parallel.distributed", "_verify_param_shape_across_processes"),
    ("torch.nn.parallel.distributed", "_sync_module_states"),
    ("torch.utils.data.dataloader", "_SingleProcessDataLoaderIter"),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter"),
    ("lightning.pytorch.trainer.connectors.data_connector", "_InfiniteBarrier"),
    # ---------------------------------------------------------------- optional packages
    (
        f"{ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer",
        "_lazy_init_hp_params_optimizer_state",
        ("self",),
    ),
    (f"{ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer", "_hp_optimizer_states_linked"),
    (f"{ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer", "single_partition_of_fp32_groups"),
    (f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3", "fp32_partitioned_groups_flat"),
    ("deepspeed.runtime.fp16.loss_scaler:LossScalerBase", "cur_scale"),
    ("deepspeed.utils.tensor_fragment:tensor_fragment", "hp_fragment"),
    ("deepspeed.ops", "__compatible_ops__"),
    ("optuna.trial:FrozenTrial", "_trial_id"),
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
TRANSFORMERS = [  # models/huggingface/ and finetune/built.py
    ("transformers.modeling_utils:PreTrainedModel", "_no_split_modules"),
    ("transformers.modeling_utils:PreTrainedModel", "tp_plan"),
    ("transformers.modeling_utils:PreTrainedModel", "base_model_prefix"),
]
OURS_OR_PYTHONS = {"_asdict", "_exit", "_getframe", "_target_"}


def check(owner: str, name: str, *parameters: tuple[str, ...]) -> None:
    module, _, cls = owner.partition(":")
    library = module.split(".")[0]
    release = (
        ""
        if library in ("atexit", "sys")
        else f" {version({'hydra': 'hydra-core'}.get(library, library))}"
    )
    changed = f"{library}{release} changed {owner}.{name}: see {', '.join(users(name))}"
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
    for expected in parameters:
        assert tuple(inspect.signature(found).parameters) == expected, changed


def users(name: str) -> list[str]:
    """Return our files that use a name."""
    word = re.compile(rf"\b{name}\b")
    return [str(file.relative_to(SOURCE)) for file, text in _texts().items() if word.search(text)]


@functools.cache
def _texts() -> dict[Path, str]:
    return {file: file.read_text() for file in sorted(SOURCE.rglob("*.py"))}


@functools.cache
def _code(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # it is made by C or by a function
        return ""


@pytest.mark.parametrize("row", TABLE, ids=lambda row: ".".join(row[:2])[-80:])
def test_a_private_name_is_as_we_know_it(row):
    owner, name, *_ = row
    library = owner.split(".")[0]
    if library in ("deepspeed", "optuna"):
        pytest.importorskip(library)
    if FROM.get(name, (0,)) <= needs.TORCH < BEFORE.get(name, (3,)):
        check(*row)
    assert users(name), f"{name} is not used any more"


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


def test_the_table_is_complete():
    used, ours = _private_names()
    known = {name for _, name, *_ in [*TABLE, *TRANSFORMERS]} | OURS_OR_PYTHONS
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
    for file, text in _texts().items():
        for node in ast.walk(ast.parse(text)):
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
