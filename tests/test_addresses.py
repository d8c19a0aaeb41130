"""A run's configuration cannot send values of the environment to a server of its author's."""

import pytest
from omegaconf import OmegaConf

from armature import config, loading
from armature.checkpoint import resume
from armature.errors import ConfigError


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("SECRET", "s3cr3t")
    monkeypatch.setenv("STORE", "s3://mine/runs")
    monkeypatch.delenv("NOT_SET", raising=False)


def run(folder, *, root=None, **data):
    groups = {name: {"_target_": "x"} for name in config.NEEDED}
    groups |= {
        "run": {"name": "a", "dir": str(folder)},
        "checkpoint": {"root": root},
        "data": {"_target_": "x", **data},
    }
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(groups)))
    return folder


SENT = [
    "http://host/${oc.env:SECRET}",
    "${oc.env:NOT_SET,http:}//host/${oc.env:SECRET}",
    "http://host/${oc.decode:${oc.env:SECRET}}",
    "${data.address}/x",
    "simplecache::http://host/${oc.env:SECRET}",
    "http://${oc.env:SECRET,fallback}.host",
]


@pytest.mark.parametrize("root", SENT)
def test_a_value_of_the_environment_is_not_sent(tmp_path, root):
    folder = run(tmp_path, root=root, address="http://host/${oc.env:SECRET}")
    with pytest.raises(
        ConfigError, match=r"checkpoint.root=.*would send a value of this environment"
    ) as error:
        resume.last_checkpoint(folder)
    assert "s3cr3t" not in str(error.value)
    with pytest.raises(ConfigError, match=r"would send a value of this environment"):
        loading.open_run(folder)


def test_a_name_behind_an_address_is_part_of_it(tmp_path):
    folder = run(tmp_path, root="http://host")
    file = folder / "config.yaml"
    file.write_text(file.read_text().replace("name: a", "name: ${oc.env:SECRET}"))
    with pytest.raises(
        ConfigError, match=r"run.name=http://host/.*would send a value of this environment"
    ):
        resume.last_checkpoint(folder)


def test_a_broken_reference_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config.yaml: .*no.such"):
        loading.open_run(run(tmp_path, path="${no.such}"))


def test_addresses_of_data_are_checked_also_in_lists(tmp_path):
    cfg = config.read_raw(
        run(tmp_path, path=["a.txt", "https://host/${oc.env:SECRET}"]) / "config.yaml"
    )
    with pytest.raises(ConfigError, match=r"config.yaml: data.path\[1\]=https://host/"):
        config.require_plain_addresses(cfg, tmp_path / "config.yaml")
    config.require_plain_addresses(cfg, tmp_path / "config.yaml", typed=["data.path"])
    config.require_plain_addresses(cfg, tmp_path / "config.yaml", typed=["data"])


@pytest.mark.parametrize(
    "root", ["${oc.env:STORE}", "/scratch/${oc.env:SECRET}", "s3://x", "s3://${oc.env:NOT_SET}"]
)
def test_ones_own_places_are_allowed(tmp_path, root):
    cfg = config.read_raw(run(tmp_path, root=root, address="${oc.env:STORE}") / "config.yaml")
    config.require_plain_addresses(cfg, tmp_path / "config.yaml")
