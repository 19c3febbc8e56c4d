"""Threads, and the children of a process that uses the device."""

import subprocess
import sys
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import xlatrainer as xla


class Numbers(Dataset[torch.Tensor]):
    """Map-style data that says in which process an item was made."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index))


class OnDevice(Numbers):
    """Wrongly uses the parent's device in a worker."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index), device="xla") + 1


@pytest.mark.multiprocess
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_loader_leave_the_device_alone(method: str) -> None:
    pending = torch.ones(2, device="xla") * 3
    total = torch.zeros(2, device="xla")
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=method)
    for _ in range(2):
        for batch in loader:
            total += batch.to("xla").sum(0)
    assert total.tolist() == [132, 132]
    assert pending.tolist() == [3, 3]


@pytest.mark.multiprocess
def test_the_device_in_a_forked_child_is_an_error_that_says_what_to_do() -> None:
    torch.ones(2, device="xla").sum().item()
    loader = DataLoader(OnDevice(), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match=r"(?s)forked child.*return CPU tensors"):
        next(iter(loader))
    assert (torch.ones(2, device="xla") * 2).tolist() == [2, 2]


def test_threads_record_into_one_trace() -> None:
    shared = torch.zeros(8, device="xla")
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for step in range(30):
                own = torch.full((4,), float(index), device="xla") * 2 + step
                shared[index] += 1
                if step % 10 == 9:
                    assert own.tolist() == [index * 2 + step] * 4
        except BaseException as error:  # handed to the test, which fails with it
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert shared.tolist() == [30] * 4 + [0] * 4


def test_backward_in_another_thread() -> None:
    parameter = torch.nn.Parameter(torch.ones(3).to("xla"))
    thread = threading.Thread(target=lambda: (parameter * 2).sum().backward())
    thread.start()
    thread.join()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2, 2, 2]


def test_a_process_ends_quietly_with_work_pending() -> None:
    script = "import torch, xlatrainer; x = torch.ones(3, device='xla') * 2; print(x.sum().item()); y = x + 1"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "6.0\n"
    assert done.stderr == ""
    assert xla.device().type == "xla"
