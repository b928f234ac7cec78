# SPDX-License-Identifier: Apache-2.0
"""SyncBatchNorm and its conversion compared to torch's; layers with process groups and meshes."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from data_parallel import data_parallel
from rank_pool import RankPool, connected_group, error_of
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

import normscope

pytestmark = pytest.mark.portable


def batch(rank: int) -> torch.Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(rank)).double()


def expected_mean(ranks: list[int]) -> torch.Tensor:
    return 0.1 * torch.cat([batch(rank) for rank in ranks]).mean(dim=(0, 2))


def mean_of(layer: nn.Module) -> torch.Tensor:
    layer(batch(distributed.get_rank()))
    mean = layer.running_mean
    assert isinstance(mean, torch.Tensor)
    return mean


def in_a_mesh() -> tuple[list[torch.Tensor], bool, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh["dp"].get_group()
    assigned = normscope.BatchNorm1d(3, dtype=torch.float64)
    assigned.process_group = mesh["dp"]
    layers = [
        normscope.BatchNorm1d(3, dtype=torch.float64, process_group=mesh["dp"]),
        normscope.SyncBatchNorm(3, dtype=torch.float64, process_group=mesh["dp"]),
        assigned,
        normscope.convert(nn.BatchNorm1d(3, dtype=torch.float64), process_group=mesh["dp"]),
        normscope.SyncBatchNorm.convert_sync_batchnorm(
            nn.Sequential(nn.BatchNorm1d(3, dtype=torch.float64)), mesh["dp"]
        )[0],
    ]
    means = [mean_of(layer) for layer in layers]
    has_group = all(getattr(layer, "process_group", None) is group for layer in layers)
    with pytest.raises(ValueError, match="process_group: expected a mesh of one dim") as error:
        normscope.BatchNorm1d(3, process_group=mesh)
    return means, has_group, str(error.value)


def test_a_mesh_dimension_can_be_used_as_a_group(ranks: RankPool) -> None:
    answers = ranks.run(4, in_a_mesh)

    for rank, (means, has_group, error) in enumerate(answers):
        for mean in means:
            torch.testing.assert_close(mean, expected_mean([rank % 2, rank % 2 + 2]))
        assert has_group
        assert error.endswith("got one of 2")


def with_the_default_group() -> tuple[torch.Tensor, bool]:
    layer = normscope.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3).double())
    return mean_of(layer), layer.process_group is None


def test_the_default_group_is_used_if_none_is_given(ranks: RankPool) -> None:
    for mean, has_none in ranks.run(2, with_the_default_group):
        torch.testing.assert_close(mean, expected_mean([0, 1]))
        assert has_none


def keeps_its_group() -> bool:
    group = connected_group([0, 1])
    layer = normscope.convert(nn.SyncBatchNorm(3, process_group=group))
    kept = layer.process_group is group
    other = connected_group([0, 1])
    normscope.convert(layer, process_group=other)
    return bool(kept and layer.process_group is other)


def test_convert_keeps_the_group_unless_one_is_given(ranks: RankPool) -> None:
    assert ranks.run(2, keeps_its_group) == [True, True]


def copy_with_a_group() -> list[float]:
    group = connected_group([0, 1])
    layer = normscope.BatchNorm1d(1, momentum=1.0, process_group=group)
    means = []
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        rank = float(distributed.get_rank())
        other(torch.tensor([[rank], [rank]]))
        assert other.running_mean is not None
        means.append(other.running_mean.item())
    return means


def test_a_layer_with_a_group_can_be_copied_and_pickled(ranks: RankPool) -> None:
    assert ranks.run(2, copy_with_a_group) == [[0.5, 0.5]] * 2


def name_a_group_that_is_gone() -> str:
    group = connected_group([0, 1])
    layer = normscope.BatchNorm1d(1, process_group=group)
    distributed.destroy_process_group(group)
    return error_of(lambda: layer(torch.randn(2, 1)), RuntimeError)


def test_a_destroyed_group_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(2, name_a_group_that_is_gone):
        assert message.startswith("process_group: expected a process group of this process, got")


def test_the_arguments_are_those_of_torch() -> None:
    ours = list(inspect.signature(normscope.SyncBatchNorm).parameters)
    theirs = list(inspect.signature(nn.SyncBatchNorm).parameters)

    assert ours[: ours.index("keywords")] == [name for name in theirs if name in ours]
    assert set(theirs) - set(ours) <= {"bias"}
    assert list(inspect.signature(nn.SyncBatchNorm.convert_sync_batchnorm).parameters) == list(
        inspect.signature(normscope.SyncBatchNorm.convert_sync_batchnorm).parameters
    )


@pytest.mark.parametrize("tracks", [False, True])
def test_a_layer_is_one_of_torch_and_evaluates_as_it_does(*, tracks: bool) -> None:
    x = torch.randn(4, 3, 5)
    layers = [
        c(3, track_running_stats=tracks).eval() for c in (normscope.SyncBatchNorm, nn.SyncBatchNorm)
    ]

    assert isinstance(layers[0], nn.SyncBatchNorm)
    assert type(normscope.convert(nn.SyncBatchNorm(3))) is normscope.SyncBatchNorm
    assert vars(layers[0]).keys() == vars(normscope.BatchNorm(3)).keys()
    assert torch.equal(layers[0](x), layers[1](x))


def train_in_data_parallel(kind: str) -> tuple[torch.Tensor, str]:
    torch.manual_seed(0)
    layer = nn.SyncBatchNorm(4) if kind == "converted" else normscope.SyncBatchNorm(4)
    model = normscope.convert(nn.Sequential(nn.Linear(3, 4), layer), "world")
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(distributed.get_rank()))
    data_parallel(model, sends_buffers=False)(x).square().sum().backward()
    others = nn.Sequential(nn.Linear(3, 4), layer, nn.SyncBatchNorm(4))
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU") as error:
        data_parallel(others, sends_buffers=False)
    mean = layer.running_mean
    assert isinstance(mean, torch.Tensor)
    return mean, str(error.value)


@pytest.mark.parametrize("kind", ["converted", "made by hand"])
def test_data_parallel_takes_synchronized_layers_on_cpus_but_not_torch_s(
    ranks: RankPool, kind: str
) -> None:
    (mean, _), (other, _) = ranks.run(2, train_in_data_parallel, kind)

    assert torch.equal(mean, other)
