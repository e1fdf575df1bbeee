"""torchdynamo #1940: width and height of a box become Python numbers before a crop is scaled."""

import torch


@torch.compile(backend="eager")
def area(box, features):
    width = int(box[2] - box[0])
    height = int(box[3] - box[1])
    return features.mean() * (width * height)


features = torch.rand(3, 16, 16)
for right in (9, 11, 13):
    area(torch.tensor([1, 2, right, 12]), features)
