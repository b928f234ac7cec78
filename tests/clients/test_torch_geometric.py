# SPDX-License-Identifier: Apache-2.0
"""torch_geometric: normalization over the nodes of graphs of unequal sizes."""

from __future__ import annotations

import pytest
import torch
from client import SAMPLES, Client, NetworkTests
from torch import Tensor, nn
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import GCNConv, global_add_pool, models
from torch_geometric.nn.norm import BatchNorm, HeteroBatchNorm

import normscope


def graphs() -> list[Data]:
    generator = torch.Generator().manual_seed(1)

    def graph(nodes: int) -> Data:
        x = torch.randn(nodes, 5, dtype=torch.float64, generator=generator)
        return Data(x=x, edge_index=torch.randint(nodes, (2, 3 * nodes), generator=generator))

    return [graph(nodes) for nodes in range(6, 6 + 3 * SAMPLES, 3)]


def of_graphs(model: nn.Module, part: slice) -> Tensor:
    batch = Batch.from_data_list(graphs()[part])
    y: Tensor = global_add_pool(model(batch.x, batch.edge_index), batch.batch)
    return y


class Network(nn.Module):
    """Two convolutions with torch_geometric's layer, which contains one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(5, 8), GCNConv(8, 3)
        self.norm = BatchNorm(8)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        y: Tensor = self.second(self.norm(self.first(x, edges)).relu(), edges)
        return y


CLIENTS = {
    "gcn": Client(Network, of_graphs),
    "gin": Client(
        lambda: models.GIN(5, 8, num_layers=2, out_channels=3, norm="BatchNorm"), of_graphs
    ),
}


class TestNetworks(NetworkTests):
    """The network tests for all CLIENTS."""


def test_a_heterogeneous_layer_is_not_converted() -> None:
    with pytest.warns(UserWarning, match="layers to convert, got none in HeteroBatchNorm"):
        normscope.convert(HeteroBatchNorm(8, num_types=2))


def test_a_batch_of_graphs_can_be_without_graphs() -> None:
    batch = Batch.from_data_list(graphs())
    text, nodes = repr(batch), batch.num_nodes
    pairs = HeteroData({"a": {"x": torch.ones(3, 2)}, "b": {"num_nodes": 2}})
    pairs["a", "to", "b"].edge_index = torch.zeros(2, 4, dtype=torch.long)

    empty, empty_pairs = normscope.training.empty_batch_like(
        (batch, Batch.from_data_list([pairs] * SAMPLES))
    )

    assert type(empty) is type(batch)
    assert (repr(batch), batch.num_graphs, batch.num_nodes) == (text, SAMPLES, nodes)
    for each in (empty, empty_pairs):
        assert (each.num_graphs, each.num_nodes, each.num_edges) == (0, 0, 0)
        assert each.to_data_list() == []
    y = GCNConv(5, 8).double()(empty.x, empty.edge_index)
    assert global_add_pool(y, empty.batch, size=empty.num_graphs).shape == (0, 8)


def test_the_samples_of_joined_batches_are_graphs() -> None:
    loader = [Batch.from_data_list(graphs()[:3]), Batch.from_data_list(graphs()[3:])]

    assert [weight for _, weight in normscope.joined(loader)] == [1 / 3, 1 / (SAMPLES - 3)]
    with pytest.raises(TypeError, match="got a Data with tensors"):
        list(normscope.joined(graphs()))
