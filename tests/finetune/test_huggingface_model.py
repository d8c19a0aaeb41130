"""model=huggingface, as far as it can be tested without transformers, which lies in another
environment.
"""

import importlib
import importlib.metadata
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from armature import cli
from armature.data.labels import LabeledData
from armature.errors import ConfigError
from armature.finetune import built, check, others
from armature.layout import Layout
from armature.models.huggingface import model
from armature.models.huggingface.model import PretrainedModel
from armature.models.huggingface.sharding import plan_of
from armature.parallel import plan_check
from armature.validation import checks, combinations
from tests.finetune.folders import write_model


@pytest.fixture
def installed(monkeypatch):
    def install(version):
        def find(name):
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(others.importlib.metadata, "version", find)

    install("5.23.0")
    return install


def config(path, **model):
    node = {
        "_target_": others.CAUSAL,
        "pretrained": str(path),
        "context": 64,
        "vocab_size": None,
        **model,
    }
    run = {"root": str(path.parent / "outputs"), "name": None}
    return OmegaConf.create({"model": node, "data": {}, "run": run, "resume": "auto"})


def refused(path) -> str:
    with pytest.raises(ConfigError) as error:
        check.fill(config(path))
    [problem] = error.value.problems
    return problem


def test_the_folder_sets_the_vocabulary(tmp_path, installed):
    path = write_model(tmp_path / "model", model_type="gpt_neox")
    assert check.fill(config(path)).model.vocab_size == 4096
    inner = write_model(
        tmp_path / "inner", model_type="gemma3", vocab_size=None, text_config={"vocab_size": 7}
    )
    assert check.fill(config(inner)).model.vocab_size == 7
    assert check.named_by(config(path)) == str(path)


@pytest.mark.parametrize(
    ("version", "says"),
    [(None, "which is not installed"), ("4.57.1", "5.20 or newer, and this is 4.57.1")],
)
def test_transformers_that_is_missing_or_too_old_is_named(tmp_path, installed, version, says):
    installed(version)
    problem = refused(write_model(tmp_path / "model"))
    assert says in problem
    assert "make setup EXTRAS=finetune" in problem


def test_folders_that_cannot_be_read_are_refused(tmp_path, installed):
    assert "lacks model_type" in refused(write_model(tmp_path / "b", model_type=None))


@pytest.mark.parametrize("place", ["attention", "config.json"])
def test_packing_is_refused_for_kernels_that_mix_conversations(tmp_path, place):
    kernel = "flash_attention_2"
    path = write_model(
        tmp_path / "model", attn_implementation=kernel if place == "config.json" else None
    )
    cfg = config(path, attention=kernel if place == "attention" else None)
    cfg.data = {"source": {"packing": True}}
    [problem] = built.problems(cfg)
    assert f"model.attention={kernel} with data.source.packing=true" in problem
    assert "Type model.attention=sdpa, or data.source.packing=false." in problem


@pytest.mark.parametrize(("kind", "is_known"), [("llama", True), ("bloom", False)])
def test_packing_is_refused_for_models_not_known_to_keep_conversations_apart(kind, is_known):
    inner = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type=kind))
    )
    found = " ".join(built._packing_problems(SimpleNamespace(inner=inner)))
    says = f"of model_type={kind} is not known to keep the conversations of a row apart. Type data."
    assert says in found or (is_known and not found)


def test_pipelines_are_refused_by_name(tmp_path):
    overrides = [
        "model=huggingface",
        "model.pretrained=x",
        "strategy=pipeline",
        "trainer.devices=8",
    ]
    cfg = checks.decide(
        cli.compose([*overrides, "trainer.accelerator=cpu", "data.global_batch_size=32"])
    )
    found = combinations.problems(checks.plain(cfg), Layout.of(cfg))
    assert any(
        "model=CausalLM does not work with this strategy (pipeline)" in problem for problem in found
    ), found


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.o, self.router = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)


class Transformer(nn.Module):
    """What a plan reads of a model of transformers."""

    _no_split_modules = ("Block",)

    def __init__(self, **styles):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(8, 10, bias=False)
        inside = {"q": "colwise", "o": "rowwise", **styles}
        self.tp_plan = {"head": "colwise_gather_output", "embed": "embedding_rowwise"}
        self.tp_plan |= {f"layers.*.{name}": style for name, style in inside.items()}

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head


def test_styles_that_are_not_here_are_refused_by_name_and_only_for_a_tensor_axis():
    plan = plan_of(Transformer(router="moe_tp_experts"), prefix="inner")
    assert (
        "shards layers.*.router as moe_tp_experts, which cannot be done here. Type strategy=fsdp"
        in plan.no_tensor
    )
    assert (plan.blocks, plan.tensor) == ("inner.layers", {})
    model = Transformer()
    model.tp_plan = {}
    assert "transformers has no plan for it" in plan_of(model, prefix="inner").no_tensor
    model._no_split_modules = None
    assert plan_of(model, prefix="inner") is None


def wrapped(inner) -> nn.Module:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.heads, self.kv_heads = inner, 8, 2

        plan = property(lambda self: plan_of(self.inner, prefix="inner"))

    return Model()


def test_what_an_axis_does_not_divide_is_found_on_the_model_itself():
    static = checks.module_beside(PretrainedModel.__module__, "plan").PLAN
    sizes = {"pipe": 1, "replicate": 1, "shard": 1, "context": 1, "tensor": 2}
    assert plan_check.problems(lambda: wrapped(Transformer()), static, sizes) == []
    found = plan_check.problems(lambda: wrapped(Transformer()), static, {**sizes, "tensor": 4})
    assert any(
        "strategy.tensor=4 does not divide the model's kv_heads=2" in problem for problem in found
    )
    assert any("dim 0 of inner.head.weight (10, 8)" in problem for problem in found)
    [problem] = plan_check.problems(
        lambda: wrapped(Transformer(router="grouped_gemm")), static, sizes
    )
    assert problem.startswith(
        "strategy.tensor=2: Transformer: transformers shards layers.*.router as grouped_gemm"
    )
    assert (
        plan_check.problems(
            lambda: wrapped(Transformer(router="grouped_gemm")), static, {**sizes, "tensor": 1}
        )
        == []
    )


def test_computed_tables_keep_their_type():
    model = PretrainedModel.__new__(PretrainedModel)
    nn.Module.__init__(model)
    model.inner = Block()
    model.inner.register_buffer("inv_freq", torch.tensor([0.123456789]), persistent=False)
    model.to(torch.bfloat16)
    assert model.inner.q.weight.dtype == torch.bfloat16
    assert model.inner.inv_freq.dtype == torch.float32
    assert model.inner.inv_freq.item() == pytest.approx(0.123456789, rel=1e-7)


class Attentive(nn.ModuleList):
    """A causal language model of transformers that returns the positions it is told."""

    def __init__(self, *parts, kinds=None, model_type="llama"):
        super().__init__(parts)
        text = SimpleNamespace(layer_types=kinds, model_type=model_type)
        self.config = SimpleNamespace(get_text_config=lambda: text)

    def get_decoder(self):
        return self

    def forward(self, input_ids, use_cache=False, position_ids=None, past_key_values=None):
        return SimpleNamespace(logits=position_ids)


def causal_lm(inner):
    own = model.CausalLM.__new__(model.CausalLM)
    nn.Module.__init__(own)
    own.inner = inner
    return own


@pytest.mark.parametrize(
    ("inner", "told"),
    [
        (Attentive(kinds=["full_attention", "sliding_attention"]), None),  # as RoBERTa
        (Attentive(kinds=["full_attention", "linear_attention"]), [[3, 4]]),
        (Attentive(nn.Conv1d(4, 4, 3)), [[3, 4]]),
    ],
)
def test_a_cache_continues_at_the_models_own_positions(inner, told):
    own, cache = causal_lm(inner), SimpleNamespace(length=3, values=None, newest_only=False)
    found = own(torch.zeros(1, 2), cache=cache)
    assert (None if found is None else found.tolist()) == told


@pytest.mark.parametrize(
    ("kind", "names"), [("mamba", ("dt_proj", "out_proj", "x_proj")), ("llama", ())]
)
def test_state_space_models_name_what_they_read_past_their_linears(kind, names):
    assert causal_lm(Attentive(model_type=kind)).read_directly == names


class Tied(nn.Module):
    all_tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)


def test_two_values_of_weights_that_are_tied_are_refused():
    own = causal_lm(Tied())
    own.pretrained, own._read = "folder", lambda **options: (own.inner, {})
    with pytest.raises(ValueError, match=r"head\.weight and embedding\.weight are one parameter"):
        own.whole_state()
    own.inner.head.weight = own.inner.embedding.weight
    assert len(own.whole_state()) == 2


class Named(LabeledData):
    def __init__(self, classes):
        super().__init__()
        self.own, self.path = classes, "x.csv"

    def names(self):
        return {"classes": self.own}


TWELVE = [str(i) for i in range(12)]


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("head", "own", "numbered"),
    [
        (["NEGATIVE", "positive"], ["positive", "negative"], ["negative", "positive"]),
        (["b", "a"], ["a", "b"], ["b", "a"]),
        ([f"LABEL_{i}" for i in range(12)], ["0", "1", "10", "11", *TWELVE[2:10]], TWELVE),
        ([f"LABEL_{i}" for i in range(3)], ["1", "2"], ["LABEL_0", "1", "2"]),
        (None, ["b", "a"], ["b", "a"]),
        (["LABEL_0", "LABEL_1"], ["a", "b"], None),
        (["a", "b"], ["a", "b", "c"], None),
        (["yes", "no"], ["yes", "Yes"], None),
    ],
)
def test_data_number_classes_as_the_head_that_training_begins_with(tmp_path, head, own, numbered):
    labels = {"id2label": {str(i): name for i, name in enumerate(head)}} if head else {}
    kind = "LlamaForSequenceClassification" if head else "LlamaForCausalLM"
    path = write_model(tmp_path / "model", architectures=[kind], **labels)
    cfg, data = config(path, _target_=others.CLASSIFIER, new_head=False), Named(own)
    found = check.number_classes(cfg, data)
    if numbered is None:
        assert f"and the data {', '.join(own)}" in found[0]
        assert "type model.new_head=true" in found[0]
    else:
        assert found == []
        assert data.classes == numbered
    cfg.model.new_head, data = True, Named(own)
    assert check.number_classes(cfg, data) == []
    assert data.classes == own


@pytest.mark.parametrize(
    ("classes", "is_refused"), [(["a", "b"], False), (["b", "a"], True), (None, False)]
)
def test_a_data_module_of_users_must_number_classes_as_the_head(tmp_path, classes, is_refused):
    labels = {"0": "A", "1": "B", "2": "C"}
    path = write_model(
        tmp_path / "model", id2label=labels, architectures=["LlamaForSequenceClassification"]
    )
    cfg = config(path, _target_=others.CLASSIFIER, new_head=False)
    assert len(check.number_classes(cfg, SimpleNamespace(class_names=classes))) == is_refused
