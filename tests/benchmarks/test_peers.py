"""The peers that the benchmarks compare: the JAX models train as the torch models do, a missing peer is left out."""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import contenders, jax_models, models, steps, worker

STEPS = 3


def small(name: str, model: Callable[[], torch.nn.Module], *, like: str, size: int = 0) -> models.Benchmark:
    """A benchmark with a smaller model and batches."""
    supply = (lambda: models._images(4, 3, size, 10)) if size else (lambda: models._tokens(2, 8, 16))
    return dataclasses.replace(models.BENCHMARKS[like], name=name, model=model, batches=supply)


CASES = {
    "mnist": (models.BENCHMARKS["mnist"], jax_models.MODELS["mnist"]),
    "residual": (
        small("residual", lambda: models.resnet(models.Bottleneck, (1,), 10), like="resnet50", size=32),
        jax_models.resnet(jax_models.bottleneck, (1,)),
    ),
    "gpt": (
        small("gpt", lambda: models.Gpt(1, 32, 2, 8, 16), like="gpt"),
        lambda scope, tokens: jax_models.gpt(scope, tokens, layers=1, heads=2),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_jax_trains_as_torch_does(case: str) -> None:
    benchmark, function = CASES[case]
    batches = list(itertools.islice(benchmark.batches(), STEPS))
    torch.manual_seed(0)
    model = benchmark.model()
    step, state = jax_models.train_step(function, benchmark.optimizer, *jax_models.arrays(model))
    optimizer = benchmark.optimizer(model.parameters())
    for x, y in batches:
        expected = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        state, loss = step(state, x.numpy(), y.numpy())
        assert float(loss) == pytest.approx(expected.item(), rel=1e-3)
    trained = jax_models.arrays(model)
    for expected, found in zip(trained, state[:2], strict=True):
        assert expected.keys() == found.keys()
        for name in expected:
            difference = abs(expected[name] - found[name]).max()
            assert difference < 2e-2 * abs(expected[name]).max() + 1e-3, name


def test_steps_compares_the_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPU_NUM_DEVICES", "1")
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    steps.add_arguments(parser)
    options = ["--peers", "eager,jax", "--models", "mnist", "--rounds", "1", "--block", "1"]
    steps.run(parser.parse_args([*options, "--json", str(tmp_path / "steps.json")]))
    assert "| mnist |" in capsys.readouterr().out
    assert '"jax"' in (tmp_path / "steps.json").read_text()

    def answered(name: str, loss: float) -> contenders.Contender:
        # without a process: only what it has answered is compared
        return contenders.Contender(name, None, [{"losses": [loss, loss]}])  # type: ignore[arg-type]

    with pytest.raises(SystemExit, match="the losses disagree: jax"):
        steps._agreement([answered("eager", 2.0), answered("jax", 2.2)])


def test_a_peer_that_is_not_installed_is_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(contenders.PEERS, "torchax", "a_package_that_nobody_has")
    assert contenders.chosen("eager,torchax", []) == {"eager": sys.executable}
    assert "torchax is left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("peers", "python", "message"),
    [
        ("eager,caffe", [], "there is no peer 'caffe'"),
        ("eager", ["caffe=/usr/bin/python3"], "takes PEER=PATH"),
        ("eager", ["eager"], "takes PEER=PATH"),
        ("eager", ["eager=/no/such/python"], "/no/such/python does not run"),
    ],
)
def test_a_wrong_peer_is_said(peers: str, python: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        contenders.chosen(peers, python)


def test_every_peer_has_a_worker() -> None:
    assert worker.PEERS.keys() == contenders.PEERS.keys()
