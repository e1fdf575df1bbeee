"""kmeans_pytorch: an empty cluster gets a random point, and iterations stop by the shift of the centres."""

import torch


@torch.compile(backend="eager")
def kmeans(X, k, tol=1e-4, limit=5):
    centres = X[:k].clone()
    iteration = 0
    while True:
        choice = torch.cdist(X, centres).argmin(1)
        before = centres.clone()
        for index in range(k):
            selected = X[choice == index]
            if selected.shape[0] == 0:
                selected = X[torch.randint(len(X), (1,))]
            centres[index] = selected.mean(0)
        shift = (centres - before).norm(dim=1).sum()
        iteration += 1
        if shift**2 < tol or iteration >= limit:
            break
    return choice, centres


torch.manual_seed(0)
for _ in range(2):
    kmeans(torch.randn(12, 2), 3)
