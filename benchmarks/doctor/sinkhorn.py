"""SinkhornDistance (reports of optimal transport): iterations stop when the potentials no longer move."""

import torch


@torch.compile(backend="eager")
def sinkhorn(C, eps=0.1, max_iter=20):
    n, m = C.shape
    mu, nu = torch.full((n,), 1.0 / n), torch.full((m,), 1.0 / m)
    u, v = torch.zeros(n), torch.zeros(m)
    actual = 0
    for _ in range(max_iter):
        u1 = u
        u = eps * (torch.log(mu + 1e-8) - torch.logsumexp((-C + u[:, None] + v) / eps, 1)) + u
        v = eps * (torch.log(nu + 1e-8) - torch.logsumexp(((-C + u[:, None] + v) / eps).T, 1)) + v
        err = (u - u1).abs().sum()
        actual += 1
        if err.item() < 1e-2:
            break
    return torch.exp((-C + u[:, None] + v) / eps), actual


torch.manual_seed(0)
for _ in range(2):
    sinkhorn(torch.cdist(torch.rand(4, 2), torch.rand(5, 2)))
