"""Values, targets and files that cannot be right are refused before anything starts, with the key
and the remedy.
"""

import pytest
from hydra import compose
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from armature import cli, config
from armature.errors import ConfigError
from armature.loading import constructors
from armature.training.limits import prefer_typed
from armature.validation import quoting, relations, targets, values
from armature.validation.checks import check
from armature.validation.composing import composing, instantiate
from tests.in_process import problems_of
from tests.sampled import sampled


def words(text: str) -> list[str]:
    return text.split()


OUT_OF_RANGE = words("""
seed=-1 seed=100000000000000000000 trainer.gradient_clip_val=0 trainer.gradient_clip_val=nan
trainer.gradient_clip_val=inf trainer.limit_val_batches=-1 trainer.num_nodes=0
trainer.max_time=00:99:99:99 trainer.max_time=1h trainer.max_time=00:00:00:00
optimizer.lr=nan optimizer.lr=inf optimizer.lr=0
optimizer.weight_decay=-1 optimizer.eps=nan optimizer.betas=0.9 
optimizer.betas=[0.9,1.5] optimizer.betas=[0.9] optimizer.momentum=1.5
optimizer.base_width=0 optimizer._partial_=false
scheduler.warmup=-1 scheduler.warmup=2.5 scheduler.warmup=nan scheduler.warmup=600
scheduler.final=-1 checkpoint.every_n_minutes=inf checkpoint.keep_best=-1 checkpoint.keep_last=0
checkpoint.root='' checkpoint.root=/dev/null/x checkpoint.monitor=val/nope
checkpoint.monitor=loss 
checkpoint.monitor=abc optimizer.precision=fp16
logger.tensorboard.save_dir=5 logger.tensorboard.version=1.5
launch.hang_timeout=nan launch.allowed_packages=[]
launch.allowed_packages=[1,2] launch.rdzv_endpoint=nohost launch.grace_seconds=-1
task.preview_temperature=-1 
task.preview_prompt='' data.source.vocab_size=100
data.source.val_fraction=nan data.source.val_fraction=0 data.source.test_fraction=1.0
data.source.path=5 data.num_workers=null data.context=0
data.source=5 strategy.activation_checkpointing=some strategy.compile=yes strategy.stage=true
model._target_=null model._target_=5 model._target_=a..b model._partial_=false
run.root='' run.root=s3://bucket/runs
run.name=.. run.dir=x run.micro_batch_size=4 resume=''
model.layers=100000000 model.vocab_size=1000000000000 model.width=1000000000000
trainer.devices=100000
""")
OF_ANOTHER_FORM = words("""
run.tags={a:1} run.tags=[a,[b]]
debug=True
model=null model=5 model=[1,2] optimizer=null optimizer=[1,2] task=null strategy=null callbacks=5
logger=5 ~run +strategy.nokey=3 +strategy.shard=2 ~seed ~trainer ~model.width ~task._target_
~scheduler._target_ +callbacks.ema={decay:0.5} +callbacks.e=5 +callbacks.e={}
+callbacks.e._target_=torch.nn.Linear +logger.e._target_=torch.nn.Identity
+callbacks.e={_target_:lightning.pytorch.callbacks.EarlyStopping,monitor:val/nope}
+callbacks.e={_target_:lightning.pytorch.callbacks.DeviceStatsMonitor,_partial_:true}
trainer.test_at_end=5
""")
TOGETHER = [
    ("experiment=digits", "data.shift=100"),
    ("experiment=digits", "model.classes=2"),
    ("experiment=example", "model.width=0"),
    (
        "data=image_folder",
        "data.path=.",
        "task=image_classification",
        "model=vit_tiny",
        "model.channels=1",
    ),
    (
        "data=image_folder",
        "data.path=.",
        "task=image_classification",
        "model=vit_tiny",
        "model.image_size=8",
    ),
    ("optimizer=sgd", "optimizer.lr=abc"),
    ("optimizer=adamw", "optimizer.eps=null"),
    ("callbacks=ema", "callbacks.ema.decay=2"),
    ("callbacks=early_stopping", "callbacks.early_stopping.mode=sideways"),
    ("callbacks=monitors", "callbacks.monitors.norms_every_n_steps=0"),
    ("model=mixture_nano", "model.experts=1000000000000"),
    *(
        ("data=image_folder", "data.path=.", "task=image_classification", "model=vit_tiny", each)
        for each in words("data.std=[0,0,0] data.mean=[1] data.margin=-3 data.val_fraction=2")
    ),
    ("data=blend", "data.paths=[a]"),
    ("data=blend", "data.paths={a: b}", "data.weights={a: -1}"),
    ("data=tokens", "data.path=.", "data.source.dtype=abc"),
    *(
        ("strategy=fsdp", "trainer.devices=2", each)
        for each in (
            "strategy.shard=a b",
            "strategy.pipe=",
            "strategy.schedule=abc",
            "strategy.stages=[1]",
        )
    ),
    ("data=blend", "data.paths={a: b}", "data.source.field=[a]"),
    *(
        ("data=hf", "data.path=csv", "model=example", "task=example", f"data.data_files={each}")
        for each in ("-1", "{train: 1}")
    ),
    ("data=tokens", "data.path=.", "data.source.tokenizer=nowhere"),
    ("data=text", "data.path=null"),
    ("data=blend", "data.paths={a: b}", "data.source.val_fraction=0"),
    ("data=chat", "data.path=.", "data.source.val_fraction=1.0"),
    *(
        (
            "model=example",
            "task=example",
            "data=example",
            "data._target_=tests.plain_parts.Data",
            f"data.global_batch_size={size}",
        )
        for size in (0, -8)
    ),
]


@pytest.fixture(scope="module")
def default() -> DictConfig:
    with composing():
        return compose("train")


def assert_refused(problems: list[str], typed: str) -> None:
    key = typed.lstrip("+~").partition("=")[0]
    assert any(key in problem for problem in problems), problems
    assert all(
        "TypeError" not in problem and "ValueError" not in problem for problem in problems
    ), problems


@pytest.mark.parametrize("typed", sampled(OUT_OF_RANGE, 16, guarantee=True))
def test_a_value_is_refused_by_its_key(typed, default, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    key, _, value = typed.partition("=")
    cfg = default.copy()
    value = OmegaConf.from_dotlist([f"value={value}"]).value
    OmegaConf.update(
        cfg, key, float(value) if value in ("nan", "inf") else value, merge=False, force_add=True
    )
    with pytest.raises(ConfigError) as caught:
        check(cfg, prepare=False)
    assert_refused(caught.value.problems, typed)


@pytest.mark.parametrize(
    "typed",
    sampled(((each,) for each in [*((each,) for each in OF_ANOTHER_FORM), *TOGETHER]), 16),
    ids=" ".join,
)
def test_an_override_is_refused_by_its_key(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(problems_of(*typed), typed[-1])


@pytest.mark.parametrize(
    "value",
    ["/home/müller/x", "it's", "a;b", "a (1)", "a#b", "日本", "a=b", "1.10", "1_0", "7e12345"],
)
def test_names_that_hydra_takes_in_quotes_only_arrive_as_typed(value):
    with composing():
        assert compose("train", overrides=[quoting.quoted(f"run.name={value}")]).run.name == value


@pytest.mark.parametrize(
    "value", ["range(1,5)", "a,b", "[a,b]", "{a: 1}", "'a b'", "${seed}", "1e-3", "s3://a/b"]
)
def test_what_hydra_understands_is_left_alone(value):
    assert quoting.quoted(f"key={value}") == f"key={value}"


def test_a_sweep_over_odd_names_stays_a_sweep():
    assert quoting.quoted("resume=a/step=1,b/step=2") == "resume='a/step=1','b/step=2'"


SECRETS = [
    "aws_secret_access_key",
    "auth",
    "openai_key",
    "password",
    "token",
    "private_key",
    "credentials",
]


@pytest.mark.parametrize("name", sampled(SECRETS, 6, guarantee=True))
def test_a_secret_is_refused_and_not_repeated(name):
    ((_, problem),) = values.secrets({"logger": {"x": [{name: "hunter22"}]}})
    assert name in problem
    assert "oc.env" in problem
    assert "hunter22" not in problem


def test_a_password_in_an_address_is_refused_and_ordinary_keys_are_not():
    ((_, problem),) = values.secrets({"checkpoint": {"root": "s3://me:hunter22@bucket/x"}})
    assert "checkpoint.root" in problem
    assert "hunter22" not in problem
    plain = {
        "metric_key": "a",
        "document_token": "b",
        "url": "https://host:80/x@y",
        "token": "${oc.env:TOKEN}",
    }
    assert not [*values.secrets(plain)]


@pytest.mark.guarantee
def test_the_value_of_a_secret_variable_is_not_shown(monkeypatch, capsys):
    monkeypatch.setenv("MY_TOKEN", "s3cr3tvalue")
    problems = problems_of("model.width=${oc.env:MY_TOKEN}")
    with pytest.raises(SystemExit):
        cli.refuse(problems)
    shown = capsys.readouterr().err
    assert "model.width" in shown
    assert "s3cr3tvalue" not in shown


ALLOWED = words("""
armature.optim.muon.Muon armature.optim.adamw.adamw armature.strategies.auto.auto
armature.models.decoder.model.Decoder armature.data.corpus.Corpus example.task.PointClassification
torch.nn.GELU torch.nn.functional.gelu torch.optim.Muon torch.optim.lr_scheduler.OneCycleLR
lightning.pytorch.callbacks.EarlyStopping lightning.pytorch.loggers.CSVLogger
lightning.pytorch.profilers.SimpleProfiler lightning.pytorch.strategies.DDPStrategy
torchmetrics.MeanMetric
""")
FORBIDDEN = words("""
os.system shutil.copyfile torch.load torch.hub.load numpy.load functools.partial builtins.eval
hydra.utils.instantiate hydra.utils.call hydra.utils.get_method
lightning.pytorch.cli.instantiate_class lightning.pytorch.cli.LightningCLI lightning.pytorch.Trainer
armature.checkpoint.storage.remove armature.checkpoint.directory.remove armature.loading.instantiate
armature.loading.load_task armature.files.replace torch.nn.functional.boolean_dispatch
torch.nn.parallel.parallel_apply torch.jit.load subprocess.Popen importlib.import_module
""")
WIDE = [
    "armature",
    "example",
    "torch",
    "torchmetrics",
    "lightning",
    "numpy",
    "shutil",
    "functools",
    "hydra",
    "os",
    "builtins",
    "subprocess",
    "importlib",
]


def called(target: str, packages: list[str]) -> list[str]:
    node = {"_target_": target, "_partial_": True}
    return targets.problems({"logger": {}, "x": {"deep": [[node]]}}, packages)


@pytest.mark.parametrize("target", sampled(ALLOWED, 5))
def test_what_configurations_name_is_allowed(target):
    assert called(target, targets.installed()) == []


@pytest.mark.parametrize("target", sampled(FORBIDDEN, 10, guarantee=True))
def test_what_runs_other_code_is_refused_in_nested_lists_and_in_allowed_packages(target):
    for packages in (targets.installed(), WIDE):
        (problem,) = called(target, packages)
        assert problem.startswith(f"x.deep[0][0]._target_={target}: ")


@pytest.mark.guarantee
def test_a_stranger_s_run_allows_no_packages(tmp_path):
    node = {"_target_": "shutil.copyfile", "src": "a", "dst": "b"}
    groups = {name: {"_target_": "torch.nn.Identity"} for name in config.NEEDED}
    cfg = OmegaConf.create(
        {
            **groups,
            "run": {"dir": str(tmp_path)},
            "model": node,
            "launch": {"allowed_packages": ["shutil"]},
        }
    )
    with pytest.raises(
        ConfigError,
        match=r"model._target_=shutil.copyfile: only packages in launch.allowed_packages",
    ):
        targets.check(cfg)
    with pytest.raises(ConfigError, match=r"model._target_=shutil.copyfile: it can run other code"):
        targets.check(cfg, overrides=["launch.allowed_packages=[shutil]"])


def test_what_may_be_meant_otherwise_is_warned_of(caplog):
    relations.warn.cache_clear()  # it warns once in a process
    assert problems_of("checkpoint.monitor=val/perplexity") == []
    assert "Type checkpoint.mode=max if its highest is" in caplog.text


def test_what_a_constructor_refuses_is_named_by_its_key():
    cfg = OmegaConf.create(
        {"callbacks": {"ema": {"_target_": "armature.callbacks.ema.EMA", "decay": 2}}}
    )
    with (
        pytest.raises(
            ConfigError,
            match=r"^callbacks.ema: ValueError: decay must lie .* Got 2 \(.*ema.py:\d+\)\.$",
        ),
        constructors(),
    ):
        instantiate(cfg.callbacks.ema)
    bug = OmegaConf.create({"a": {"_target_": "armature.files.sync", "path": "/nowhere/x"}})
    with pytest.raises(InstantiationException, match="FileNotFoundError"), constructors():
        instantiate(bug.a)


@pytest.mark.parametrize("content", [b"KEY=\xff\xfe", b"KEY=a\0b"])
def test_an_environment_file_that_is_no_text_is_named(content, tmp_path, capsys):
    (tmp_path / ".env").write_bytes(content)
    with pytest.raises(SystemExit):
        cli._load_env(tmp_path / ".env")
    assert f"{tmp_path / '.env'} cannot be read" in capsys.readouterr().err


def test_a_text_of_the_environment_is_a_number_where_the_key_takes_one_alone(monkeypatch):
    variables = {
        "DEVICES": "2",
        "RATE": "3e-4",
        "DEPTH": "3",
        "TIED": "false",
        "NAME": "123",
        "WARMUP": "0.5",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    keys = {
        "trainer.devices": "DEVICES",
        "trainer.test_at_end": "TIED",
        "optimizer.lr": "RATE",
        "model.layers": "DEPTH",
        "model.tied": "TIED",
        "scheduler.warmup": "WARMUP",
        "run.name": "NAME",
    }
    cfg = values.written_out(
        cli.compose([f"{key}=${{oc.env:{name}}}" for key, name in keys.items()])
    )
    assert [OmegaConf.select(cfg, key) for key in keys] == [2, False, 3e-4, 3, False, 0.5, "123"]


def test_references_that_cannot_be_resolved_are_named_together(monkeypatch):
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    typed = [
        "trainer.devices=${oc.env:NOT_SET_HERE}",
        "trainer.max_steps=${trainer.max_steps}",
        "seed=${oc.env:NOT_SET_HERE}",
        "data.context=${lr}",  # to which model.context refers
    ]
    with pytest.raises(ConfigError) as error:
        check(prefer_typed(cli.compose(typed), typed), prepare=False)
    assert sorted(each.partition(" Type NOT")[0] for each in error.value.problems) == [
        "data.context: it is ${lr}, and there is no key 'lr'. Type data.context=… for its value.",
        "seed: the environment has no NOT_SET_HERE.",
        "trainer.devices: the environment has no NOT_SET_HERE.",
        "trainer.max_steps: Recursive interpolation detected. "
        "Type trainer.max_steps=… for its value.",
    ]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("mine.model.Net", "src/mine is no package. Add an empty file: touch src/mine/__init__.py"),
        ("model.Net", "there is no package 'model'. Type task._target_=mine.model.Net."),
    ],
)
def test_a_class_of_the_user_s_that_is_not_found_is_named(target, said, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.py").write_text("\nclass Net(Module):\n")
    monkeypatch.setattr(targets, "SOURCES", tmp_path)
    (found,) = targets.problems({"task": {"_target_": target}}, ["armature"])
    assert found.endswith(said)


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (
            ["~data", "data=example"],
            "~data: no run is without data. Leave it out, or type data=….",
        ),
        (["~logger"], "~logger: no run is without logger. Type logger=none."),
        (["seed=abc"], "seed=abc: must be a whole number from 0 to 4294967295."),
        (
            ["run.tags=a"],
            "run.tags=a: must be a list of words, as in [baseline,long]. Type run.tags=[a].",
        ),
        (
            ["trainer.max_time={minutes: 1}"],
            "trainer.max_time={minutes: 1}: must be DD:HH:MM:SS, as in "
            "trainer.max_time=00:12:00:00, or null.",
        ),
        (
            ["resume=null"],
            "resume=null: must be auto, never, required, or the path of a run or a checkpoint.",
        ),
        (
            ['optimizer.lr="1e-3"'],
            "optimizer.lr=1e-3: must be a number above 0. It is text: type "
            "optimizer.lr=1e-3 without quotes.",
        ),
    ],
)
def test_what_to_type_instead_is_said(typed, expected):
    assert problems_of("experiment=example", *typed) == [expected]
