"""pytorch_geometric remove_self_loops: edges are kept by a mask, and attributes with them if there are any."""

import torch


def remove_self_loops(edge_index, edge_attr=None):
    mask = edge_index[0] != edge_index[1]
    edge_index = edge_index[:, mask]
    if edge_attr is None:
        return edge_index, None
    return edge_index, edge_attr[mask]


@torch.compile(backend="eager")
def propagate(x, edge_index, edge_attr=None):
    edge_index, edge_attr = remove_self_loops(edge_index, edge_attr)
    message = x[edge_index[0]]
    if edge_attr is not None:
        message = message * edge_attr
    return torch.zeros_like(x).index_add(0, edge_index[1], message)


torch.manual_seed(0)
x, edges = torch.randn(6, 4), torch.randint(6, (2, 15))
for attr in (None, torch.rand(15, 1), None, torch.rand(15, 1)):
    propagate(x, edges, attr)
