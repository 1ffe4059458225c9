"""The supported GPUs."""

import pytest

from widemesh.pallas_kernels.gpu.targets import TARGETS, by_capability, supported


def test_architectures():
    assert {name: target.arch for name, target in TARGETS.items()} == {
        "H100": "sm_90a",
        "H200": "sm_90a",
        "B200": "sm_100a",
        "B300": "sm_103a",
    }
    assert [name for name, target in TARGETS.items() if target.is_blackwell] == ["B200", "B300"]
    assert supported() == "sm_90a (H100 and H200), sm_100a (B200), sm_103a (B300)"


@pytest.mark.parametrize(
    ("capability", "kind", "name"),
    [
        ("9.0", "NVIDIA H100 80GB HBM3", "H100"),
        ("9.0", "NVIDIA H200", "H200"),
        ("9.0", "NVIDIA GH200 480GB", "H200"),
        ("9.0", "NVIDIA H20", "H100"),
        ("10.0", "NVIDIA GB200", "B200"),
        ("10.3", "NVIDIA B300 SXM6", "B300"),
        ("8.0", "NVIDIA A100-SXM4-80GB", None),
        ("12.0", "NVIDIA RTX PRO 6000", None),
    ],
)
def test_target_of_a_device(capability, kind, name):
    target = by_capability(capability, kind)
    assert (target.name if target else None) == name
