"""Files of configs/hardware/, and what hardware=this reads."""

import pytest

from armature import hardware, project
from armature.errors import ConfigError
from armature.planning import devices

FILES = sorted(file.stem for file in devices.FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_complete_and_in_plausible_units(name):
    device = devices.named(name)
    assert 2**33 < device.memory_bytes < 2**40
    assert (
        device.network_bytes_per_second
        < device.link_bytes_per_second
        < device.memory_bytes_per_second
    )
    rates = dict(device.peak_flops)
    assert rates.pop("float64") <= rates["float32"] == min(rates.values())
    assert (device.capability is None) == (device.accelerator == "cpu")
    assert "Sources" in (devices.FOLDER / f"{name}.yaml").read_text()


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(
        ConfigError,
        match=r"hardware=h100_80: .* Did you mean hardware=h100_80gb\? Known: a100_40gb",
    ):
        devices.named("h100_80")


@pytest.mark.parametrize(
    ("driver_name", "memory_gib", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, 312e12),
        ("NVIDIA H100 80GB HBM3", 79.2, 989.4e12),
        ("Tesla T4", 14.6, 65e12),
    ],
)
def test_this_finds_the_file_of_the_gpu(driver_name, memory_gib, peak, monkeypatch):
    monkeypatch.setattr(hardware, "gpu_count", lambda: 4)
    monkeypatch.setattr(hardware, "gpu_name", lambda: driver_name)
    monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: int(memory_gib * 2**30))
    device = devices.this()
    assert (device.memory_bytes, device.devices_per_machine) == (int(memory_gib * 2**30), 4)
    assert device.peak_flops["float16"] == peak


def test_this_refuses_a_gpu_without_a_file(monkeypatch):
    monkeypatch.setattr(hardware, "gpu_count", lambda: 1)
    monkeypatch.setattr(hardware, "gpu_name", lambda: "NVIDIA GeForce 256")
    monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: None)
    with pytest.raises(ConfigError, match=r"no file in .* describes NVIDIA GeForce 256"):
        devices.this()


def test_processes_share_a_machine_without_gpus(monkeypatch):
    monkeypatch.setattr(hardware, "gpu_count", lambda: 0)
    whole, half = devices.this(), devices.this().shared_by(2)
    assert half.memory_bytes == whole.memory_bytes // 2
    assert half.peak_flops["float32"] == whole.peak_flops["float32"] / 2
    assert devices.named("t4").shared_by(8) == devices.named("t4")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("memory_gib: -1", "memory_gib=-1: must be a number above 0"),
        ("peak_tflops: 989", "peak_tflops=989: must be a number above 0 for each type"),
        ("peak_tflops: {float32: 1, bf16: 2}", "of float8, bfloat16, .*; float32 always"),
        ("devices_per_machine: 2.5", "devices_per_machine=2.5: must be a whole number"),
        ("capability: 9.0", "capability=9.0: must be two whole numbers"),
        ("accelerator: tpu", "accelerator=tpu: must be one of gpu, cpu"),
        ("memory_gib: 'a", "mine.yaml cannot be read"),
    ],
)
def test_a_file_of_the_users_own_is_refused_by_key_and_value(line, answer, tmp_path, monkeypatch):
    example = (devices.FOLDER / "h100_80gb.yaml").read_text()
    (tmp_path / "hardware").mkdir()
    kept = example
    if line.startswith("peak_tflops"):
        kept = "\n".join(
            each for each in kept.splitlines() if not each.startswith(("  ", "peak_tflops"))
        )
    # the last of two equal keys counts
    (tmp_path / "hardware" / "mine.yaml").write_text(f"{kept}\n{line}\n")
    monkeypatch.setattr(project, "FOLDERS", [tmp_path, project.SHIPPED])
    with pytest.raises(ConfigError, match=answer):
        devices.named("mine")
