"""Files of configs/hardware/, and what hardware=this reads."""

from pathlib import Path

import pytest

from armature import hardware
from armature.errors import ConfigError
from armature.planner import devices

FILES = sorted(file.stem for file in devices.FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_complete_and_in_plausible_units(name: str) -> None:
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
    assert (device.processors > 0) == (device.accelerator == "gpu")
    assert "Sources" in (devices.FOLDER / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", FILES)
def test_rates_agree_with_those_that_mfu_is_measured_by(name: str) -> None:
    published = hardware.published_peak(name.partition("_")[0].upper())
    if published is not None:
        assert devices.named(name).peak_flops["bfloat16"] == pytest.approx(published)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
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
def test_this_finds_the_file_of_the_gpu(
    driver_name: str, memory_gib: float, peak: float, monkeypatch
) -> None:
    monkeypatch.setattr(hardware, "gpu_count", lambda: 4)
    monkeypatch.setattr(hardware, "gpu_name", lambda: driver_name)
    monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: int(memory_gib * 2**30))
    device = devices.this()
    assert (device.memory_bytes, device.devices_per_machine) == (int(memory_gib * 2**30), 4)
    assert device.peak_flops["float16"] == peak


def test_this_passes_over_files_without_names(tmp_path: Path, monkeypatch) -> None:
    for name in ("t4", "mine"):
        text = (devices.FOLDER / "t4.yaml").read_text()
        kept = [line for line in text.splitlines() if name == "t4" or not line.startswith("names:")]
        (tmp_path / f"{name}.yaml").write_text("\n".join(kept))
    monkeypatch.setattr(devices, "FOLDER", tmp_path)
    monkeypatch.setattr(hardware, "gpu_count", lambda: 1)
    monkeypatch.setattr(hardware, "gpu_name", lambda: "Tesla T4")
    monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: None)
    assert devices.this().name == "t4"


def test_this_refuses_a_gpu_without_a_file(monkeypatch) -> None:
    monkeypatch.setattr(hardware, "gpu_count", lambda: 1)
    monkeypatch.setattr(hardware, "gpu_name", lambda: "NVIDIA GeForce 256")
    monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: None)
    with pytest.raises(ConfigError, match=r"no file in .* describes NVIDIA GeForce 256"):
        devices.this()


def test_processes_share_a_machine_without_gpus(monkeypatch) -> None:
    monkeypatch.setattr(hardware, "gpu_count", lambda: 0)
    whole, half = devices.this(), devices.this().shared_by(2)
    assert half.memory_bytes == whole.memory_bytes // 2
    assert half.peak_flops["float32"] == whole.peak_flops["float32"] / 2
    assert devices.named("t4").shared_by(8) == devices.named("t4")


def test_ram_is_a_containers_limit_where_it_has_one(monkeypatch) -> None:
    real = Path.read_text
    monkeypatch.setattr(Path, "exists", lambda self: str(self) == "/sys/fs/cgroup/memory.max")
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda self, *a, **k: "1048576\n" if "cgroup" in str(self) else real(self, *a, **k),
    )
    assert hardware.ram_bytes() == 2**20


def test_a_copied_file_without_what_the_simulator_needs_is_refused(tmp_path, monkeypatch) -> None:
    text = (devices.FOLDER / "h100_80gb.yaml").read_text()
    left_out = ("capability:", "processors:", "  float64:")
    lines = [line for line in text.splitlines() if not line.startswith(left_out)]
    (tmp_path / "h100_80gb.yaml").write_text(text)
    (tmp_path / "mine.yaml").write_text("\n".join(lines))
    monkeypatch.setattr(devices, "FOLDER", tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"hardware=mine: .*mine.yaml: .*missing.* has processors: 132, capability: \[9, 0\]",
    ):
        devices.named("mine")
    (tmp_path / "mine.yaml").write_text("\n".join([*lines, "capability: [7, 5]", "processors: 40"]))
    device = devices.named("mine")
    assert device.capability == (7, 5)
    with pytest.raises(ConfigError, match=r"64-true: hardware=mine has no float64 in peak_tflops"):
        device.peak("float64")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("memory_gib: nan", "memory_gib: nan, but must be a number above 0"),
        ("memory_gib: -1", "memory_gib: -1, but must be a number above 0"),
        ("link_gb_per_second: [450]", r"link_gb_per_second: \[450\], but must be a number"),
        ("peak_tflops: 989", "peak_tflops: 989, but must be a number above 0 for each type"),
        ("peak_tflops: {float32: 1, bf16: 2}", "must be of float8, bfloat16, .*, not bf16"),
        ("devices_per_machine: 2.5", "devices_per_machine: 2.5, but must be a whole number"),
        ("capability: 9.0", "capability: 9.0, but must be two whole numbers"),
        ("accelerator: tpu", "accelerator: tpu, but must be gpu or cpu"),
        ("memory_gib: 'a", "mine.yaml cannot be read"),
        ("\x00", "mine.yaml cannot be read"),
    ],
)
def test_a_file_of_the_users_own_is_refused_by_key_and_value(
    line, answer, tmp_path, monkeypatch
) -> None:
    example = (devices.FOLDER / "h100_80gb.yaml").read_text()
    (tmp_path / "h100_80gb.yaml").write_text(example)
    kept = "" if line.startswith("\x00") else example
    if line.startswith("peak_tflops"):
        kept = "\n".join(
            each for each in kept.splitlines() if not each.startswith(("  ", "peak_tflops"))
        )
    (tmp_path / "mine.yaml").write_text(f"{kept}\n{line}\n")  # the last of two equal keys counts
    monkeypatch.setattr(devices, "FOLDER", tmp_path)
    with pytest.raises(ConfigError, match=answer):
        devices.named("mine")


def test_a_file_that_holds_no_keys_is_refused(tmp_path, monkeypatch) -> None:
    (tmp_path / "mine.yaml").write_text("5")
    monkeypatch.setattr(devices, "FOLDER", tmp_path)
    with pytest.raises(ConfigError, match=r"mine.yaml holds no keys"):
        devices.named("mine")


@pytest.mark.parametrize(
    "typed", ["+hardware=h200", "hardwre=h200", "hardware.memory_gib=3", "~hardware=h200"]
)
def test_a_word_that_is_nearly_hardware_is_refused(typed) -> None:
    with pytest.raises(ConfigError, match=r"there is no such key here. Type hardware="):
        devices.take_name([typed])
