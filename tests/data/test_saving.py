"""Saving tensors of the device: whole at once, and one at a time."""

import io
import json
import os
import pickle
import subprocess
import sys
import types
import weakref
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from xlatrainer import storage
from xlatrainer.data import serialization
from xlatrainer.data.saving import save
from xlatrainer.errors import CheckpointError

Pair = namedtuple("Pair", ["first", "second"])


class Thing:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.me = self


def test_any_nest_goes_to_the_cpu(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).to("xla")
    data = {"list": [tensor, (tensor * 2,)], "pair": Pair(tensor, 1), "text": "a", "order": OrderedDict(a=tensor)}
    for target in (tmp_path / "file", io.BytesIO()):
        save(data, target)
        if isinstance(target, io.BytesIO):
            target.seek(0)
        found = torch.load(target, weights_only=False)
        assert torch.equal(found["list"][1][0], torch.arange(6.0) * 2)
        assert found["list"][0] is found["pair"].first
        assert found["order"]["a"] is found["list"][0]
        assert found["list"][0].device.type == "cpu"
    assert tensor.device.type == "xla"
    save(Thing(tensor), tmp_path / "thing")
    thing = torch.load(tmp_path / "thing", weights_only=False)
    assert thing.me is thing
    assert thing.tensor.device.type == "cpu"


def test_it_is_read_without_this_package(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3).to("xla")
    save(model.state_dict(), tmp_path / "file")
    script = (
        "import sys, torch; print(torch.load(sys.argv[1])['bias'].tolist()); assert 'xlatrainer' not in sys.modules"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "file")], capture_output=True, text=True, check=True
    )
    assert json.loads(answer.stdout) == model.bias.tolist()


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(3, 3, bias=False)
        self.two = torch.nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight


def shares(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def test_what_is_shared_stays_shared(tmp_path: Path) -> None:
    model = Tied().to("xla")
    model.two.weight = model.one.weight
    save(model.state_dict(), tmp_path / "state")
    found = torch.load(tmp_path / "state")
    assert shares(found["one.weight"], found["two.weight"])
    serialization.save(model.state_dict(), tmp_path / "streamed")
    assert os.listdir(tmp_path / "streamed.tensors") == ["tensor_0.pt"]
    found = serialization.load(tmp_path / "streamed")
    assert found["one.weight"] is found["two.weight"]
    assert torch.equal(found["one.weight"], model.one.weight.cpu())
    save(model, tmp_path / "model")
    whole = torch.load(tmp_path / "model", weights_only=False)
    assert whole.one.weight is whole.two.weight
    assert isinstance(whole.one.weight, torch.nn.Parameter)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    save([1], tmp_path / "file")
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        save([lambda: 0], tmp_path / "file")
    assert torch.load(tmp_path / "file") == [1]
    assert os.listdir(tmp_path) == ["file"]


def test_urls(bucket: str) -> None:
    data = {"a": torch.ones(3, device="xla"), "n": 1}
    save(data, f"{bucket}/whole")
    assert torch.load(io.BytesIO(storage.read(f"{bucket}/whole")))["a"].tolist() == [1, 1, 1]
    serialization.save(data, f"{bucket}/streamed")
    assert [entry.name for entry in storage.list_folder(f"{bucket}/streamed.tensors")] == ["tensor_0.pt"]
    assert serialization.load(f"{bucket}/streamed")["a"].tolist() == [1, 1, 1]


NEST: Any = {
    "tensors": [torch.arange(3), torch.zeros(2, 0), torch.ones(2, dtype=torch.bfloat16), torch.tensor(1 + 2j)],
    "view": torch.arange(100.0)[10:14],
    ("key", 1): {"none": None, "set": {1, 2}, "dtype": torch.float16, "bytes": b"\x00", "nan": float("inf")},
}


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_one_at_a_time(tmp_path: Path, device: str) -> None:
    data = {**NEST, "tensors": [tensor.to(device) for tensor in NEST["tensors"]]}
    serialization.save(data, tmp_path / "nest")
    names = [f"tensor_{n}.pt" for n in range(5)]
    assert sorted(os.listdir(tmp_path / "nest.tensors")) == names
    assert (tmp_path / "nest.tensors" / names[-1]).stat().st_size < 2000  # not all that the view is a part of
    found = serialization.load(tmp_path / "nest")
    assert list(found) == list(NEST)
    for one, two in zip([*found["tensors"], found["view"]], [*NEST["tensors"], NEST["view"]], strict=True):
        assert one.device.type == "cpu"
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
    assert found["key", 1] == NEST["key", 1]
    serialization.save([torch.ones(1)], tmp_path / "nest")
    assert os.listdir(tmp_path / "nest.tensors") == ["tensor_0.pt"]
    assert torch.load(tmp_path / "nest.tensors" / "tensor_0.pt").tolist() == [1]


def test_the_host_holds_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies on the CPU are counted, those alive at once."""
    alive: list[Any] = []
    most = []
    write = serialization._write_tensor

    def counted(tensor: torch.Tensor, path: str) -> None:
        real = torch.Tensor.cpu

        def cpu(self: torch.Tensor) -> torch.Tensor:
            copy = real(self)
            alive.append(weakref.ref(copy))
            most.append(sum(each() is not None for each in alive))
            return copy

        monkeypatch.setattr(torch.Tensor, "cpu", cpu)
        write(tensor, path)
        monkeypatch.setattr(torch.Tensor, "cpu", real)

    monkeypatch.setattr(serialization, "_write_tensor", counted)
    serialization.save([torch.full((1000,), float(n), device="xla") for n in range(20)], tmp_path / "many")
    assert len(most) == 20
    assert max(most) == 1


def test_what_cannot_be_loaded_safely_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"data\['thing'\] is a Thing"):
        serialization.save({"thing": Thing(torch.ones(1))}, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nest"
    with pytest.raises(FileNotFoundError):
        serialization.load(path)
    serialization.save([torch.ones(1000)], path)
    tensor = tmp_path / "nest.tensors" / "tensor_0.pt"
    content = tensor.read_bytes()
    tensor.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"tensor_0\.pt is damaged"):
        serialization.load(path)
    torch.save([1], tensor)
    with pytest.raises(CheckpointError, match="holds no tensor"):
        serialization.load(path)
    tensor.write_bytes(pickle.dumps(print))
    with pytest.raises(CheckpointError, match=r"tensor_0\.pt is damaged"):
        serialization.load(path)
    tensor.unlink()
    with pytest.raises(CheckpointError, match=r"tensor_0\.pt is missing"):
        serialization.load(path)
    path.write_text(path.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(CheckpointError, match="has format 9"):
        serialization.load(path)
    path.write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="was not written by"):
        serialization.load(path)


def test_what_pytorch_xla_wrote_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("torch_xla.utils.serialization")

    class TensorReference:
        def __init__(self, tid: int) -> None:
            self.tid = tid

    TensorReference.__module__, TensorReference.__qualname__ = module.__name__, "TensorReference"
    module.TensorReference = TensorReference
    for name in ("torch_xla", "torch_xla.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    nest = OrderedDict(weight=TensorReference(0), more=[TensorReference(1), (TensorReference(0), "text", 3)])
    torch.save(nest, tmp_path / "peer")
    (tmp_path / "peer.tensors").mkdir()
    for number in range(2):
        torch.save(torch.full((2,), float(number)), tmp_path / "peer.tensors" / f"tensor_{number}.pt")
    monkeypatch.undo()
    found = serialization.load(tmp_path / "peer")
    assert found["weight"] is found["more"][1][0]
    assert (found["more"][0].tolist(), found["more"][1][1:]) == ([1, 1], ("text", 3))
    torch.save({"thing": Thing(torch.ones(1))}, tmp_path / "unsafe")
    with pytest.raises(CheckpointError, match="holds more than tensors and plain data"):
        serialization.load(tmp_path / "unsafe")


@pytest.mark.parametrize(
    ("rank", "local_rank", "master_only", "global_master", "writes"),
    [
        (0, "0", True, False, True),
        (1, "1", True, False, False),
        (2, "0", True, False, True),  # the first of the second machine
        (2, "0", True, True, False),
        (3, "1", False, False, True),
        (1, None, True, False, False),
        (0, None, True, True, True),
    ],
)
def test_who_writes(
    rank: int,
    local_rank: str | None,
    master_only: bool,
    global_master: bool,
    writes: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    save([torch.ones(1, device="xla")], tmp_path / "whole", master_only, global_master)
    serialization.save([torch.ones(1, device="xla")], tmp_path / "streamed", master_only, global_master)
    assert (tmp_path / "whole").exists() == writes
    assert (tmp_path / "streamed").exists() == writes
