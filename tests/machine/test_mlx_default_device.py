"""Which GPU MLX computes on."""

import pytest

from labkit.machine.facts import macos, mlx_default_device


def test_cuda_needs_a_driver_and_a_package(tmp_path, monkeypatch):
    driver = tmp_path / "version"
    packages = ("a-package-that-is-not-installed", "numpy")
    monkeypatch.setattr(mlx_default_device, "CUDA_PACKAGES", packages)
    assert not mlx_default_device.has_cuda(driver)
    driver.write_text("NVRM version: 580")
    assert mlx_default_device.has_cuda(driver)
    monkeypatch.setattr(mlx_default_device, "CUDA_PACKAGES", packages[:1])
    assert not mlx_default_device.has_cuda(driver)


@pytest.mark.parametrize(
    ("metal", "cuda", "gpu"),
    [(True, False, "metal"), (False, True, "cuda"), (False, False, None)],
)
def test_the_gpu_has_the_name_of_its_device(monkeypatch, metal, cuda, gpu):
    monkeypatch.setattr(macos, "has_metal", lambda: metal)
    monkeypatch.setattr(mlx_default_device, "has_cuda", lambda: cuda)
    assert mlx_default_device.mlx_gpu() == gpu
