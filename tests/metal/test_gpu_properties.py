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
        (None, None),
    ],
)
def test_a_mac_s_cores_are_parsed_and_a_kernel_counts_its_lanes(text, cores, monkeypatch):
    def ioreg(*command):
        if text is None:
            raise FileNotFoundError("ioreg")
        return text

    monkeypatch.setattr(gpu_properties, "command_output", ioreg)
    monkeypatch.setattr(gpu_properties.macos, "threadgroup_limits", lambda: (1024, 32768))
    emulator = Emulator()
    read = gpu_properties.gpu_properties("metal", lambda call: emulator(call))  # not read before
    assert read == GpuProperties(cores, EMULATED.lanes, 1024, 32768)


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
