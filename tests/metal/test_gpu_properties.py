"""The sizes of a GPU, read from the machine."""

import pytest

from labkit.metal import gpu_properties
from labkit.metal.emulator.kernel_emulator import Emulator
from labkit.metal.gpu_properties import EMULATED, GpuProperties


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ('  |   "gpu-core-count" = 14\n  |   "model" = "Apple M1 Pro"\n', 14),
        ('"model" = "x"', None),
    ],
)
def test_the_cores_of_a_mac_are_parsed(text, cores):
    assert gpu_properties.gpu_cores(text) == cores


def test_a_kernel_counts_the_lanes_of_its_simdgroup():
    assert gpu_properties.lanes(Emulator()) == EMULATED.lanes


@pytest.mark.parametrize(("lanes", "threads"), [(64, 1024), (32, 128)])
def test_a_gpu_of_other_sizes_is_refused(lanes, threads):
    with pytest.raises(ValueError, match="the kernels need 32 and 256"):
        GpuProperties(8, lanes, threads, 32768)


def test_the_drivers_attributes_are_read(monkeypatch):
    """A driver that answers with ten times an attribute's number, and has 32 lanes."""

    class Driver:
        def cuInit(self, flags):
            return 0

        def cuDeviceGet(self, device, index):
            return 0

        def cuDeviceGetAttribute(self, number, attribute, device):
            number._obj.value = {10: 32, 1: 1024}.get(attribute, 10 * attribute)

    monkeypatch.setattr(gpu_properties.ctypes, "CDLL", lambda name: Driver())
    read = gpu_properties._cuda.__wrapped__()
    assert read == GpuProperties(160, 32, 1024, 80)
