"""Meshes: devices with named axes, and which devices programs run on."""

import pytest
import torch

import xlatrainer as xla
from xlatrainer.distributed import HybridMesh, Mesh, get_1d_mesh, get_global_mesh, is_spmd, set_global_mesh, use_spmd


def test_axes_by_name_and_shape() -> None:
    mesh = Mesh(range(8), (4, 2), ("data", "model"))
    assert mesh.size() == 8
    assert dict(mesh.shape()) == {"data": 4, "model": 2}
    assert mesh.get_logical_mesh().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.get_axis_name_idx("model") == 1
    assert mesh.get_axis_name_idx("other") is None
    assert mesh == Mesh(range(8), (4, 2), ("data", "model"))
    assert mesh != Mesh(range(8), (2, 4), ("data", "model"))
    assert Mesh(range(2), (2,)).axis_names == ("axis0",)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((range(8), (4, 4), ("a", "b")), "has 16 places, and 8 device ids"),
        ((range(4), (2, 2), ("a",)), "need as many names"),
        ((range(4), (2, 2), ("a", "a")), "a name of its own"),
        (([0, 0], (2,), ("a",)), "in a mesh once only"),
        (([0, 8], (2,), ("a",)), "there are the devices 0 to 7"),
    ],
)
def test_what_does_not_fit_together(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Mesh(*arguments)  # type: ignore[arg-type]


def test_one_host_is_a_hybrid_mesh_too() -> None:
    mesh = HybridMesh(ici_mesh_shape=(2, 4), axis_names=("data", "model"))
    assert mesh == Mesh(range(8), (2, 4), ("data", "model"))
    with pytest.raises(ValueError, match=r"there are 1 host\(s\) with 8 device\(s\) each"):
        HybridMesh(ici_mesh_shape=(2, 4), dcn_mesh_shape=(2, 1))


def test_the_global_mesh_says_where_programs_run() -> None:
    assert not is_spmd()
    mesh = get_1d_mesh("data")
    set_global_mesh(mesh)
    assert is_spmd()
    assert get_global_mesh() is mesh
    assert xla.devices() == [torch.device("xla", 0)]
    assert xla.real_devices() == [f"CPU:{i}" for i in range(8)]


def test_tensors_of_before_are_brought_along() -> None:
    before = torch.arange(6.0).to("xla")
    pending = before * 2
    use_spmd()
    reshards = xla.counters.value("Reshard")
    assert (before + 1).tolist() == [1, 2, 3, 4, 5, 6]
    assert pending.tolist() == [0, 2, 4, 6, 8, 10]
    assert xla.counters.value("Reshard") == reshards + 1
    assert (before + 2).tolist() == [2, 3, 4, 5, 6, 7]  # and stays there
    assert xla.counters.value("Reshard") == reshards + 1


def test_meshes_over_the_same_devices_share_them() -> None:
    for devices in ([0], [0, 1], range(8)):
        assert Mesh(devices, (len(devices),)).home is Mesh(devices, (1, len(devices)), ("a", "b")).home
    assert Mesh([0, 1], (2,)).home is not Mesh([1, 0], (2,)).home
