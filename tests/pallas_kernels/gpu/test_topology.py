"""Bad input of topologies; what they are good for is seen in `test_aot.py`."""

import pytest

from widemesh.pallas_kernels.gpu.topology import topology


def test_an_unknown_target_is_an_error():
    with pytest.raises(ValueError, match="target='A100' must be one of H100, H200, B200, B300"):
        topology("A100")


@pytest.mark.parametrize("devices", [0, 9, 12])
def test_devices_fill_whole_hosts(devices):
    with pytest.raises(ValueError, match=f"devices={devices} must be 1 to 8 or a multiple of 8"):
        topology("H200", devices)
